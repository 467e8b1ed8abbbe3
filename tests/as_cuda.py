"""CUDA's habits on a CPU, in real half-precision numbers: what makes a training in half precision behave otherwise on a GPU

`install()` changes the operators of this process, once and for good, before a model runs:

- Autocast follows CUDA's lists: `exp`, `sum`, `pow`, norms and losses are in fp32, `mv` and the cells of RNNs in half precision, `dot` and
  `index_put` in the widest dtype among their arguments, `BCELoss` is refused, and what only the CPU's lists hold is left as it is.
- Dropout draws another mask for each size of its numbers, as CUDA's fused kernel does: for the same seed, masks in fp16 and in fp32 agree
  by chance alone, as do those of a tensor that is contiguous and of one that is not. So does dropout inside
  `scaled_dot_product_attention`, but for the backend `MATH`, which draws in fp32.
- `_foreach_lerp_` with a number as weight, which averages of weights use, raises no version of what it writes to.
- Under autocast to bf16, `LSTM`, `GRU` and `RNN` compute in fp16: PyTorch casts to fp16 what cuDNN gets, whatever autocast's dtype.
- Dropout between the layers of an RNN draws from a state of cuDNN's own, which no seed and no restored state of PyTorch's rewinds.
- If asked, convolutions in fp32 round what they get to TF32, as cuDNN does by default from the A100 on, unless
  `torch.backends.cudnn.allow_tf32` is False.

It does without devices, waits, memory and the rounding of kernels: for these, see test_fake_cuda.py and test_cuda.py."""
import os,re,warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
import torch
from torch import Tensor
from torch._C import DispatchKey,DispatchKeySet,_ExcludeDispatchKeyGuard,_dispatch_get_registrations_for_dispatch_key
from torch.library import Library,fallthrough_kernel

floats = torch.float16,torch.bfloat16,torch.float32 # what autocast casts
no_autocast = DispatchKeySet(DispatchKey.AutocastCPU)
composite = DispatchKeySet(DispatchKey.CompositeImplicitAutograd)
below = DispatchKeySet(DispatchKey.CompositeExplicitAutograd)
rnns = [f'{o}.{kind}' for o in ('lstm','gru','rnn_tanh','rnn_relu') for kind in ('input','data')]
libs = [] # alive, else their operators would go back

def op(name):
    "The operator that PyTorch names so, as in `sum.dim_IntList`"
    packet,_,overload = name.partition('.')
    return getattr(getattr(torch.ops.aten, packet), overload or 'default')

def here(name, key): return 'aten::'+name in _dispatch_get_registrations_for_dispatch_key(key)

# %% autocast
def cuda_list(which):
    "The operators of one of CUDA's lists in the header of the PyTorch that is installed: `_(sum, dim_IntList)`"
    text = (Path(torch.__file__).parent/'include/ATen/autocast_mode.h').read_text()
    body = re.search(rf'#define AT_FORALL_{which}\(_\)(.*?[^\\])\n', text, re.S)[1]
    names = ['.'.join(filter(None, o)) for o in re.findall(r'_\((\w+)(?:, (\w+))?\)', body)]
    return names+re.findall(r'"([\w.]+)"', body) # the latter where a signature changes

def cast(o, dtype):
    "`o` with each float that autocast casts in `dtype`"
    if isinstance(o, Tensor): return o.to(dtype) if o.dtype in floats else o
    return type(o)(cast(x, dtype) for x in o) if isinstance(o, (list,tuple)) else o

def tensors(o):
    if isinstance(o, Tensor): yield o
    elif isinstance(o, (list,tuple)):
        for x in o: yield from tensors(x)

def in_dtype(op, to, /, *args, **kwargs):
    "`op` as autocast calls it where it casts to the dtype `to`"
    with _ExcludeDispatchKeyGuard(no_autocast):
        if to is None: return op(*args, **kwargs)
        return op(*cast(args, to), **{k: cast(v, to) for k,v in kwargs.items()})

def in_fp32(op, /, *args, **kwargs): return in_dtype(op, torch.float32, *args, **kwargs)
def in_fp16(op, /, *args, **kwargs): return in_dtype(op, torch.float16, *args, **kwargs)
def in_half(op, /, *args, **kwargs): return in_dtype(op, torch.get_autocast_dtype('cpu'), *args, **kwargs)
def in_widest(op, /, *args, **kwargs):
    "In fp32 if any argument is, else as it comes"
    fp32 = any(t.dtype==torch.float32 for t in tensors([*args,*kwargs.values()]))
    return in_dtype(op, torch.float32 if fp32 else None, *args, **kwargs)
def refused(op, /, *args, **kwargs):
    raise RuntimeError('torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.')

def autocast(lib):
    def rule(f, names):
        for n in names: lib.impl(n, partial(f, op(n)), 'AutocastCPU')
    half = cuda_list('LOWER_PRECISION_FP')
    fp32 = [o for part in ('FP32','FP32_SET_OPT_DTYPE','DIFFERENT_REDISPATCH_SIGNATURE') for o in cuda_list(part)]
    rule(in_half, [o for o in half if not here(o, 'AutocastCPU')]) # the CPU's own rules keep a cache of casts
    rule(in_fp32, fp32)
    rule(in_widest, cuda_list('PROMOTE'))
    rule(in_fp16, rnns)
    rule(refused, ['binary_cross_entropy'])
    for o in _dispatch_get_registrations_for_dispatch_key('AutocastCPU'):
        if not o.startswith('aten::'): continue # torchvision's, say, which CUDA's autocast casts as well
        name = o.removeprefix('aten::')
        if name not in rnns and not here(name, 'AutocastCUDA'): lib.impl(name, fallthrough_kernel, 'AutocastCPU')

# %% dropout
class CuDNN:
    "Whether an RNN runs, and the state from which its dropout draws"
    depth,state = 0,torch.Generator()

def drawn_for(x):
    "A generator whose numbers depend on one that PyTorch's gives, on the size of the numbers in `x`, and on its layout"
    if CuDNN.depth: return CuDNN.state
    return torch.Generator().manual_seed(torch.randint(2**62, (), device='cpu').item()+x.itemsize+100*x.is_contiguous())

def native_dropout(x, p, train):
    mask = torch.rand(x.shape, generator=drawn_for(x), device=x.device)>=p
    return x*mask.to(x.dtype).mul_(1/(1-p) if p<1 else 0),mask

fused_dropout = torch.ops.aten.native_dropout.default

def dropout(x, p, train):
    if train and 0<p<1 and x.numel(): return fused_dropout(x, p, train)[0]
    return op('dropout').redispatch(composite, x, p, train)

def rnn(op, *args):
    CuDNN.depth += 1
    try: return op.redispatch(composite, *args)
    finally: CuDNN.depth -= 1

def is_fused():
    "Not where a program has chosen the backend `MATH`"
    o = torch.backends.cuda
    return o.flash_sdp_enabled() or o.mem_efficient_sdp_enabled() or o.cudnn_sdp_enabled()

def attention(q, k, v, attn_mask=None, dropout_p=0., is_causal=False, *, scale=None, enable_gqa=False):
    "Fused kernels score in fp32, and draw by the dtype of the query"
    if not (dropout_p and is_fused()):
        args = q,k,v,attn_mask,dropout_p,is_causal
        return op('scaled_dot_product_attention').redispatch(composite, *args, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa: k,v = (o.repeat_interleave(q.shape[-3]//o.shape[-3], -3) for o in (k,v))
    scores = q.float()@k.float().transpose(-2, -1)*(q.shape[-1]**-0.5 if scale is None else scale)
    if is_causal: attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None and attn_mask.dtype==torch.bool: scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None: scores = scores+attn_mask
    return fused_dropout(scores.softmax(-1).to(q.dtype), dropout_p, True)[0]@v

def random_numbers(lib):
    lib.impl('native_dropout', native_dropout, 'CPU')
    for key in ('CPU','AutogradCPU'): # each of these is made of others, which see to the gradients
        lib.impl('dropout', dropout, key)
        lib.impl('scaled_dot_product_attention', attention, key)
        for n in rnns: lib.impl(n, partial(rnn, op(n)), key)

# %% versions
def uncounted(op, ts, *args):
    "On a CPU, operators for single tensors count these writes"
    with ExitStack() as stack:
        for t in ts: stack.enter_context(torch.autograd._unsafe_preserve_version_counter(t))
        op.redispatch(below, ts, *args)

def versions(lib):
    for n in ('_foreach_lerp_.Scalar','_foreach_lerp_.ScalarList'):
        if here(n, 'CompositeExplicitAutograd'): lib.impl(n, partial(uncounted, op(n)), 'CPU')

# %% TF32
def rounded(t):
    "To the 10 bits of TF32"
    if t is None or t.dtype!=torch.float32 or not torch.backends.cudnn.allow_tf32: return t
    return ((t.contiguous().view(torch.int32)+0x1000)&~0x1fff).view(torch.float32)

def tf32(lib):
    forward,backward = op('convolution'),op('convolution_backward')
    lib.impl('convolution', lambda x, w, *args: forward.redispatch(below, rounded(x), rounded(w), *args), 'CPU')
    lib.impl('convolution_backward', lambda g, x, w, *args: backward.redispatch(below, rounded(g), rounded(x), rounded(w), *args), 'CPU')

def install(with_tf32=False):
    "Let this process compute on its CPU as CUDA would"
    if libs: return
    libs.append(Library('aten', 'IMPL'))
    with warnings.catch_warnings(): # that operators are overridden
        warnings.simplefilter('ignore')
        for f in (autocast,random_numbers,versions,*[tf32]*with_tf32): f(*libs)

def install_if_asked():
    "For `FASTAI_AMP16_DEVICE=as_cuda` or `as_cuda:tf32`, in each process that trains"
    device,_,option = os.environ.get('FASTAI_AMP16_DEVICE', 'cpu').partition(':')
    if device=='as_cuda': install(option=='tf32')
