"Counts the kernels that a forward pass launches on a GPU, and the casts among them, with fake CUDA tensors and without a GPU"
import math,warnings
from contextlib import contextmanager,nullcontext
from unittest.mock import patch
import torch,torchvision.models as tv
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,CancelFitException,DataLoaders,F,Learner,Recorder,nn
    from fastai.callback.fp16 import MixedPrecision
    from fastai.layers import ToTensorBase
    from fastai.vision.learner import create_unet_model
    from fastai_amp16.all import half_forward
from benchmarks.shared import markdown
from benchmarks.shared.script import parser,store

# %% models
class Block(nn.Module):
    "A block of a GPT: causal attention and an MLP, each after a layer norm"
    def __init__(self, d, n_heads):
        super().__init__()
        self.n_heads,self.norm1,self.norm2 = n_heads,nn.LayerNorm(d),nn.LayerNorm(d)
        self.qkv,self.out,self.up,self.down = nn.Linear(d, 3*d),nn.Linear(d, d),nn.Linear(d, 4*d),nn.Linear(4*d, d)
    def forward(self, x):
        q,k,v = [o.unflatten(-1, (self.n_heads,-1)).transpose(1, 2) for o in self.qkv(self.norm1(x)).chunk(3, -1)]
        x = x+self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x+self.down(F.gelu(self.up(self.norm2(x))))

class GPT(nn.Module):
    "A model of the size of GPT-2"
    def __init__(self, vocab=50257, length=1024, d=768, depth=12):
        super().__init__()
        self.token,self.at = nn.Embedding(vocab, d),nn.Embedding(length, d)
        self.blocks,self.norm = nn.Sequential(*[Block(d, 12) for _ in range(depth)]),nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.token.weight
    def forward(self, x): return self.head(self.norm(self.blocks(self.token(x)+self.at.weight[:x.shape[1]])))

class RMSBlock(nn.Module):
    "A residual MLP after an RMS norm"
    def __init__(self, d):
        super().__init__()
        self.norm,self.up,self.down = nn.RMSNorm(d),nn.Linear(d, 4*d),nn.Linear(4*d, d)
    def forward(self, x): return x+self.down(F.silu(self.up(self.norm(x))))

def rms_mlp(d=512, depth=8): return nn.Sequential(nn.Linear(64, d), *[RMSBlock(d) for _ in range(depth)], nn.RMSNorm(d), nn.Linear(d, 10))

def unet():
    "fastai's U-Net, without its changes of tensor type, which launch no kernel and which fake tensors do not support"
    model = create_unet_model(tv.resnet34, 2, (224,224), pretrained=False)
    for m in model.modules(): m._modules.update({n: nn.Identity() for n,c in m._modules.items() if isinstance(c, ToTensorBase)})
    return model

def image(): return torch.empty(8, 3, 224, 224)

models = {
    'ResNet-50': (tv.resnet50, image), 'ConvNeXt-T': (tv.convnext_tiny, image), 'EfficientNet-B0': (tv.efficientnet_b0, image),
    'ViT-B/16': (tv.vit_b_16, image), 'Swin-T': (tv.swin_t, image), 'GPT-2': (GPT, lambda: torch.empty(8, 1024, dtype=torch.long)),
    'U-Net': (unet, image), 'RMS norm MLP': (rms_mlp, lambda: torch.empty(8, 64))}

# %% counting
not_here = 'PyTorch is built without CUDA' if not torch.backends.cuda.is_built() else \
    "before version 2.10, PyTorch aborts if autograd meets fake CUDA tensors" if torch.__version__<(2,10) else None

@contextmanager
def fake_cuda(
    *models:nn.Module # Their parameters and buffers become fake CUDA tensors
):
    "A context in which CUDA tensors have shape, dtype and layout, but no data, and autocast follows CUDA's rules, without a GPU"
    if not_here: raise RuntimeError(f"No fake CUDA tensors: {not_here}.")
    def fake(t):
        new = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device='cuda')
        return nn.Parameter(new, t.requires_grad) if isinstance(t, nn.Parameter) else new
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings(), \
         patch('torch.cuda.amp.common.amp_definitely_not_available', lambda: False), patch('torch.cuda.is_bf16_supported', lambda: True), \
         patch.object(nn.Module, 'to', lambda self, *_, **__: self): # they are on the device already
        warnings.filterwarnings('ignore', 'Accessing the data pointer of FakeTensor')
        fakes = {} # tied weights stay tied
        for d in (d for model in models for m in model.modules() for d in (m._parameters,m._buffers)):
            d.update({k: fakes[t] if t in fakes else fakes.setdefault(t, fake(t)) for k,t in d.items() if t is not None})
        yield

def tensors(o): return [t for t in tree_leaves(o) if isinstance(t, Tensor)]

def _launches(args):
    "Launches of a multi-tensor operation: each takes at most 64 tensors and 320 blocks of 65536 elements"
    ts = args[0]
    return max(math.ceil(len(ts)/64), math.ceil(sum(math.ceil(t.numel()/65536) for t in ts)/320))

class Kernels(TorchDispatchMode):
    "Records each operation that launches a kernel, with its arguments and results. Views and allocations launch none"
    def __init__(self):
        super().__init__()
        self.ops = []
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        res = f(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in f._schema.returns)
        silent = view or f.namespace=='prim' or f._opname.startswith(('empty','new_empty','_unsafe_view'))
        if not silent: self.ops.append((f,args,kwargs or {},res))
        return res
    def attention(self, q, k, v, *args, f=F.scaled_dot_product_attention, **kwargs):
        "Counts as one kernel; without a GPU, PyTorch would decompose it"
        n = len(self.ops)
        res = f(q, k, v, *args, **kwargs)
        assert res.dtype==q.dtype==k.dtype==v.dtype # autocast casts nothing
        self.ops[n:] = [(torch.ops.aten.scaled_dot_product_attention.default, (q,k,v,*args), kwargs, res)]
        return res
    def __enter__(self):
        self.patch = patch.object(F, 'scaled_dot_product_attention', self.attention)
        self.patch.start()
        return super().__enter__()
    def __exit__(self, *args):
        super().__exit__(*args)
        self.patch.stop()
    def count(self):
        "Kernels, and the casts among them"
        kernels = casts = 0
        for f,args,kwargs,res in self.ops:
            n = _launches(args) if f._opname.startswith('_foreach') else 1
            kernels += n
            if 'copy' in f._opname: casts += n*(len({t.dtype for t in tensors((args,kwargs,res))})>1)
        return kernels,casts

class _Forward(Callback):
    "Counts from the start of a batch to its prediction, and ends the fit before the backward pass"
    order = MixedPrecision.order-1 # its cast of the prediction is not part of the forward pass
    def before_batch(self):
        self.kernels = Kernels()
        self.kernels.__enter__()
    def after_pred(self): self.kernels.__exit__(None, None, None)
    def before_backward(self): raise CancelFitException()

def by_fastai(model, x):
    "A batch with fastai's `to_fp16`"
    learn = Learner(DataLoaders([(x,x)], []), model, lambda pred,y: pred.sum(), cbs=[counts:=_Forward(),MixedPrecision()])
    learn.remove_cb(Recorder) # it would read the loss
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return counts.kernels

def within(
    context # Takes the model; returns a context manager to run it in
): # A function of model and input that returns a `Kernels`
    "A forward pass in a context"
    def f(model, x):
        with Kernels() as res, context(model): model(x)
        return res
    return f

contenders = {'fp32': within(lambda model: nullcontext()), 'autocast': within(lambda model: torch.autocast('cuda', torch.float16)),
              "fastai's `to_fp16`": by_fastai, '`to_fp16_dynamic`': within(half_forward)}

def measure(name):
    "Kernels and casts of each contender"
    make,inputs = models[name]
    model = make().train()
    with fake_cuda(model):
        x = inputs().cuda()
        return dict(model=name, **{k: f(model, x).count() for k,f in contenders.items()})

def claim(rows):
    "How many more kernels a forward pass launches than in fp32, in a sentence"
    def more(k): return markdown.span((r[k][0]/r['fp32'][0]-1 for r in rows), '.0%')
    def beside(r): return r['`to_fp16_dynamic`'][0]-r['autocast'][0]
    also = markdown.listed(f"{r['model']}: {abs(n)} {'more' if n>0 else 'fewer'}" for r in rows if (n := beside(r)))
    ours = more('`to_fp16_dynamic`')
    return (f"A forward pass launches {ours} more kernels with `to_fp16_dynamic` than in fp32, as many as with autocast, "
            "which fastai's `to_fp16` uses"+f' ({also})'*bool(also))

def table(res):
    "A Markdown table"
    def show(o): return f'{o[0]} ({o[1]})'
    return markdown.table(['model',*contenders], ((r['model'],*(show(r[k]) for k in contenders)) for r in res['rows']))

def section(res):
    return f"""### Kernels of a forward pass on a GPU

{claim(res['rows'])}.

The additional kernels are casts: one for each weight, which `to_fp16_dynamic` leaves to autocast, those of the inputs, those around a
softmax, and those around layer norms with weights, group norms and RMS norms. Batch norms and instance norms need none, since they
read half precision and compute in fp32.

No GPU is needed to count kernels: PyTorch {res['torch']} runs the models, in training mode, on fake CUDA tensors, which have no data. The
models are {markdown.listed(r['model'] for r in res['rows'])}."""

def main(args=None):
    p = parser(__file__, __doc__, models=(models,'which models'))
    a = p.parse_args(args)
    res = dict(torch=torch.__version__.split('+')[0], rows=[measure(o) for o in a.models])
    print(table(res))
    store(res, a.out)

if __name__=='__main__': main()
