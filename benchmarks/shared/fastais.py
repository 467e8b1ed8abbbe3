"Runs fastai's own mixed precision on a CPU, too, where its hard-coded 'cuda' is replaced with 'cpu'"
from contextlib import ExitStack,contextmanager
from types import SimpleNamespace
from unittest.mock import patch
import torch
from fastai.basics import OptimWrapper,default_device,partial
from fastai.callback import fp16

fused_adamw = partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True)) # PyTorch's, as an `opt_func`

def _nesting():
    "How many autocast contexts are open"
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()

def _non_native_before_fit(self, before_fit=fp16.NonNativeMixedPrecision.before_fit):
    "Calls `before_fit`, which asserts that the data is on a GPU and uses it for nothing else"
    dls,self.learn.dls = self.learn.dls,SimpleNamespace(device=torch.device('cuda'))
    try: before_fit(self)
    finally: self.learn.dls = dls

@contextmanager
def fastais():
    "A context in which fastai's own callbacks can train in half precision on a CPU; afterwards autocast is off"
    device = default_device().type
    depth,dtype = _nesting(),torch.get_autocast_dtype(device)
    with ExitStack() as patches:
        if device=='cpu':
            patches.enter_context(patch.object(fp16, 'autocast', lambda device, **kw: torch.autocast('cpu', **kw)))
            patches.enter_context(patch.object(fp16, 'GradScaler', lambda device, **kw: torch.amp.GradScaler('cpu', **kw)))
            patches.enter_context(patch.object(fp16.NonNativeMixedPrecision, 'before_fit', _non_native_before_fit))
        try: yield
        finally:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, dtype)
            for _ in range(_nesting()-depth): torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
