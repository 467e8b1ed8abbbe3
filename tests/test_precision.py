"`half_forward` beside plain autocast, norms beside float64, and what is left behind (nothing)"
import copy,gc,pickle,re,threading
from contextlib import nullcontext
from functools import partial
import numpy as np
import pytest,torch
import torch.nn.functional as F
from fastai.layers import BatchNorm1dFlat,LinBnDrop
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from fastai_amp16.precision.names import find_modules
from fastai_amp16.precision.plan import PrecisionPlan,half_forward,is_norm,norm_types,register_norm
from common import learner,mlp,not_as_cuda

pytestmark = pytest.mark.cpu_only("beside that one's autocast")

dtypes = pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=['fp16','bf16'])

class Net(nn.Module):
    "Modules by name, and a function of them that is the forward pass"
    def __init__(self, f, **mods):
        super().__init__()
        for k,v in mods.items(): setattr(self, k, v)
        self.f = f
    def forward(self, *xs): return self.f(self, *xs)

def tied():
    net = Net(lambda s,x: s.b(F.gelu(s.a(x)))+s.c(x.softmax(-1)), a=nn.Linear(8,8), b=nn.Linear(8,8), c=nn.Linear(8,8))
    net.b.weight = net.a.weight
    return net

def tied_embedding():
    net = Net(lambda s,i: s.out(torch.tanh(s.lin(s.emb(i)))), emb=nn.Embedding(11,8), lin=nn.Linear(8,8), out=nn.Linear(8,11, bias=False))
    net.out.weight = net.emb.weight
    return net

def frozen():
    net = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,8), nn.ReLU(), nn.Linear(8,4))
    net[2].requires_grad_(False)
    return net

class CustomWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w,self.scale = nn.Parameter(torch.randn(8,4)),nn.Parameter(torch.ones(4))
    def forward(self, x): return x@self.w*self.scale

class WSConv(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        return F.conv2d(x, (w-w.mean((1,2,3), keepdim=True))/(w.std((1,2,3), keepdim=True)+1e-5), self.bias, self.stride, self.padding)

class CosineLinear(nn.Linear):
    def forward(self, x): return F.linear(F.normalize(x), F.normalize(self.weight))

def img(): return torch.randn(2,4,6,6)
def vec(): return torch.randn(5,8)
def seq(): return torch.randn(3,5,8)
def vols(): return torch.randn(2,2,4,4,4)
def attention(**kwargs): return nn.MultiheadAttention(8, 2, batch_first=True, **kwargs)
def checkpointed(reentrant):
    block = nn.Sequential(nn.Linear(8,8), nn.GELU(), nn.Linear(8,8))
    return Net(lambda s,x: s.o(checkpoint(s.a, s.i(x), use_reentrant=reentrant)), i=nn.Linear(8,8), a=block, o=nn.Linear(8,2))
def sep_attention(s, x): return s.a(x, x[:,:3].flip(2), x[:,:3], need_weights=False)[0]
nets = {
    'linear':             (lambda: nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4)), vec),
    'conv':               (lambda: nn.Sequential(nn.Conv2d(4,8,3), nn.ReLU(), nn.Conv2d(8,4,1, bias=False)), img),
    'conv1d':             (lambda: nn.Sequential(nn.Conv1d(5,6,3), nn.ConvTranspose1d(6,2,3)), seq),
    'conv3d':             (lambda: nn.Sequential(nn.Conv3d(2,3,3), nn.ConvTranspose3d(3,2,2)), vols),
    'grouped conv':       (lambda: nn.Sequential(nn.Conv2d(4,8,3, groups=2), nn.Conv2d(8,8,3, groups=8)), img),
    'transposed conv':    (lambda: nn.Sequential(nn.ConvTranspose2d(4,6,3, stride=2), nn.ReLU(), nn.ConvTranspose2d(6,4,3, groups=2)), img),
    'channels last':      (lambda: nn.Sequential(nn.Conv2d(4,8,3), nn.ReLU(), nn.Conv2d(8,4,3)).to(memory_format=torch.channels_last), img),
    'attention':          (lambda: Net(lambda s,x: s.a(x,x,x)[0], a=attention()), seq),
    'cross attention':    (lambda: Net(sep_attention, a=attention()), seq),
    'attention, kdim':    (lambda: Net(lambda s,x: s.a(x, x[...,:6], x[...,:4])[0], a=attention(kdim=6, vdim=4)), seq),
    'attention, bias_kv': (lambda: Net(lambda s,x: s.a(x,x,x)[0], a=attention(add_bias_kv=True)), seq),
    'tied':               (tied, vec),
    'tied embedding':     (tied_embedding, lambda: torch.randint(0,11,(6,))),
    'weight_norm':        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8,8)), nn.ReLU(), nn.Linear(8,4)), vec),
    'weight_norm conv':   (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4,4,3)), nn.ReLU()), img),
    'old weight_norm':    (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8,8)), nn.Linear(8,4)), vec),
    'spectral_norm':      (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8,8)), nn.ReLU(), nn.Linear(8,4)), vec),
    'old spectral_norm':  (lambda: nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(4,4,3)), nn.ReLU()), img),
    'frozen':             (frozen, vec),
    'custom weight':      (lambda: nn.Sequential(CustomWeight(), nn.Linear(4,4)), vec),
    'weight standardised':(lambda: nn.Sequential(WSConv(4,4,3), nn.Conv2d(4,4,3)), img),
    'cosine':             (lambda: nn.Sequential(nn.Linear(8,8), CosineLinear(8,4)), vec),
    'bilinear':           (lambda: Net(lambda s,x: s.o(s.b(x,x)), b=nn.Bilinear(8,8,4), o=nn.Linear(4,4)), vec),
    'unused':             (lambda: Net(lambda s,x: s.a(x), a=nn.Linear(8,8), b=nn.Linear(8,8)), vec),
    'checkpoint':         (lambda: checkpointed(False), vec),
    'reentrant checkpoint': (lambda: checkpointed(True), vec),
}
lstm = lambda: Net(lambda s,x: s.o(s.r(x)[0]), r=nn.LSTM(8,6, batch_first=True), o=nn.Linear(6,4))

def autocast(net, dtype): return torch.autocast('cpu', dtype)

def run(make, data, context, dtype, times=1, inside=False):
    "Output and gradients of a new net, its forward pass (or several before one backward) in `context`, and the backward pass if `inside`"
    torch.manual_seed(0)
    net,loss = make(),0
    for _ in range(times):
        x = data()
        with context(net, dtype): out = net(x)
        loss = loss+out.float().pow(2).mean()*64
    with context(net, dtype) if inside else nullcontext(): loss.backward()
    return [out.detach(), *(p.grad for p in net.parameters())]

def same(xs, ys):
    assert len(xs)==len(ys)
    for x,y in zip(xs, ys):
        assert (x is None)==(y is None)
        if x is not None: assert x.dtype==y.dtype and x.stride()==y.stride() and torch.equal(x, y)

@dtypes
@pytest.mark.parametrize('name', not_as_cuda(nets, ['spectral_norm'], 'autocast computes `mv` in half precision, and half_forward in fp32'))
def test_gradients_are_autocasts(name, dtype):
    make,data = nets[name]
    ref,ours = run(make, data, autocast, dtype),run(make, data, half_forward, dtype)
    same(ref, ours)
    assert all(g is None or g.dtype==torch.float32 for g in ours[1:])
    assert any(g is not None and g.any() for g in ours[1:])

@pytest.mark.parametrize('name', ['linear','conv','attention','tied'])
def test_two_forwards_before_one_backward(name):
    same(*[run(*nets[name], context, torch.float16, times=2) for context in (autocast,half_forward)])

knows_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()

@pytest.mark.not_as_cuda('autocast to bf16 computes recurrent layers in fp16, and half_forward in bf16')
@pytest.mark.skipif(not knows_bf16, reason='a CPU without instructions for bf16, for which oneDNN has no such kernel')
def test_lstm_in_bf16_is_autocasts():
    same(*[run(lstm, seq, context, torch.bfloat16) for context in (autocast,half_forward)])

@pytest.mark.parametrize('dtype', [torch.float16, *[torch.bfloat16]*(not knows_bf16)])
def test_lstm_on_a_cpu_is_kept_in_fp32(dtype):
    "oneDNN has no kernel for it: autocast raises"
    ref = run(lambda: Net(lambda s,x: s.o(s.r(x)[0]), r=nn.LSTM(8,6, batch_first=True), o=nn.Linear(6,4)), seq,
              lambda net,dtype: half_forward(net, dtype, keep_fp32='r'), dtype)
    same(ref, run(lstm, seq, half_forward, dtype))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(2,3,8), [3,2], batch_first=True)
    net = nn.LSTM(8,6, batch_first=True)
    with half_forward(net, dtype): out,_ = net(packed.to(dtype))
    assert type(out) is type(packed) and out.data.dtype==torch.float32

def test_second_order_gradients():
    def penalty(context):
        torch.manual_seed(0)
        net,x = nn.Sequential(nn.Linear(8,8), nn.Tanh(), nn.Linear(8,1)),torch.randn(5,8, requires_grad=True)
        with context(net, torch.float16): out = net(x)
        g, = torch.autograd.grad(out.float().sum(), [net[0].weight], create_graph=True)
        g.pow(2).sum().backward()
        return [p.grad for p in net.parameters()]
    same(penalty(autocast), penalty(half_forward))

# --- norms

class LayerNorm2d(nn.LayerNorm):
    "As in timm"
    def forward(self, x): return F.layer_norm(x.permute(0,2,3,1), self.normalized_shape, self.weight, self.bias, self.eps).permute(0,3,1,2)

class BatchNormAct2d(nn.BatchNorm2d):
    "As in timm"
    def forward(self, x): return F.relu(super().forward(x))

class MyRMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
    def forward(self, x): return x*torch.rsqrt(x.pow(2).mean(-1, keepdim=True)+1e-6)*self.weight

@register_norm
class Whiten(nn.Module):
    "Has a matmul inside, which autocast would do in half precision"
    def __init__(self, n):
        super().__init__()
        self.proj = nn.Linear(n, n, bias=False)
    def forward(self, x):
        x = x-x.mean(0)
        return self.proj(x)/(x.pow(2).mean().sqrt()+1e-6)

d1,d2,d3,line = (8,16),(8,16,5,5),(4,16,3,4,4),(8,16,12)
norms = {'BatchNorm1d': (lambda **k: nn.BatchNorm1d(16, **k), d1), 'BatchNorm2d': (lambda **k: nn.BatchNorm2d(16, **k), d2),
    'BatchNorm3d': (lambda **k: nn.BatchNorm3d(16, **k), d3), 'BatchNorm1d, plain': (lambda: nn.BatchNorm1d(16, affine=False), d1),
    'BatchNorm2d, plain': (lambda: nn.BatchNorm2d(16, affine=False), d2),
    'BatchNorm2d, no stats': (lambda: nn.BatchNorm2d(16, track_running_stats=False), d2),
    'SyncBatchNorm': (lambda: nn.SyncBatchNorm(16).eval(), d2), # trains on GPUs only
    'LayerNorm': (lambda: nn.LayerNorm(16), d1), 'LayerNorm, plain': (lambda: nn.LayerNorm(16, elementwise_affine=False), d1),
    'GroupNorm': (lambda: nn.GroupNorm(4,16), d2), 'GroupNorm, plain': (lambda: nn.GroupNorm(4,16, affine=False), d2),
    'InstanceNorm1d': (lambda: nn.InstanceNorm1d(16, affine=True), line), 'InstanceNorm2d': (lambda: nn.InstanceNorm2d(16), d2),
    'InstanceNorm2d, stats': (lambda: nn.InstanceNorm2d(16, affine=True, track_running_stats=True), d2),
    'InstanceNorm3d': (lambda: nn.InstanceNorm3d(16, affine=True), d3), 'RMSNorm': (lambda: nn.RMSNorm(16), d1),
    'RMSNorm, plain': (lambda: nn.RMSNorm(16, elementwise_affine=False), d1),
    'LocalResponseNorm': (lambda: nn.LocalResponseNorm(3, alpha=1.), d2),
    'CrossMapLRN2d': (lambda: nn.CrossMapLRN2d(3, alpha=1.), d2), 'BatchNorm1dFlat': (lambda: BatchNorm1dFlat(16), (4,3,16)),
    'LayerNorm2d': (lambda: LayerNorm2d(16), d2), 'BatchNormAct2d': (lambda: BatchNormAct2d(16), d2),
    'MyRMSNorm': (lambda: MyRMSNorm(16), d1),
    'Whiten': (lambda: Whiten(16), d1)}

@pytest.mark.parametrize('name', norms)
def test_norms_compute_in_fp32(name):
    make,shape = norms[name]
    torch.manual_seed(1)
    norm,x = make(),(torch.randn(shape)*3000).half()
    exact_norm,exact_x = copy.deepcopy(norm).double(),x.double().requires_grad_()
    exact = exact_norm(exact_x)
    net,inp = nn.Sequential(norm, nn.Identity()),x.clone().requires_grad_()
    p = nn.Parameter(torch.zeros(()))
    net.register_parameter('p', p) # some norms have no parameters
    with half_forward(net): out = net(inp)
    torchs = any(o in nn.__dict__.values() for o in type(norm).__mro__[:-1] if o is not nn.Module)
    assert out.dtype==(torch.float16 if torchs else torch.float32) and out.isfinite().all() # one's own returns what its code makes of fp32
    grad = torch.randn_like(exact)
    (exact*grad).sum().backward()
    (out.float()*grad.float()).sum().backward()
    close = dict(rtol=2e-3, atol=2e-3) # of fp16's rounding of output and gradient, 2^-11 each
    torch.testing.assert_close(out.double(), exact, **close)
    torch.testing.assert_close(inp.grad.double(), exact_x.grad, rtol=2e-3, atol=2e-3*exact_x.grad.abs().max().item()+6e-8)
    for a,b in zip(norm.parameters(), exact_norm.parameters()):
        assert a.grad.dtype==torch.float32
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=2e-3, atol=2e-3*b.grad.abs().max().item())
    for a,b in zip(norm.buffers(), exact_norm.buffers()): torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-2)

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
@pytest.mark.parametrize('shape,layout', [((8,16), None), ((4,16,8,8), None), ((4,16,8,8), torch.channels_last),
                                          ((4,16,4,4,4), torch.channels_last_3d)])
@pytest.mark.parametrize('after', [lambda x: x, lambda x: x.transpose(0, 1)], ids=['','transposed'])
def test_batch_norms_of_any_layout(dtype, shape, layout, after):
    "Beside float64, near the end of fp16: the CPU's half-precision kernels overflow, backward, where input or gradient is not contiguous"
    torch.manual_seed(0)
    norm = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](16)
    nn.init.uniform_(norm.weight)
    x = ((torch.rand(shape)*2-1)*6e4).to(dtype)
    if layout: x = x.to(memory_format=layout)
    exact_norm,exact_x,inp = copy.deepcopy(norm).double(),x.double().requires_grad_(),x.clone().requires_grad_()
    exact = after(exact_norm(exact_x))
    grad = torch.randn(exact.shape).to(dtype)
    exact.backward(grad.double())
    with half_forward(norm, dtype): out = after(norm(inp))
    out.backward(grad)
    close = 4*torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), exact, rtol=close, atol=close)
    torch.testing.assert_close(inp.grad.double(), exact_x.grad, rtol=close, atol=close*exact_x.grad.abs().max().item()+6e-8)
    def inside(m): return m.weight.grad,m.bias.grad,m.running_mean,m.running_var
    for a,b in zip(inside(norm), inside(exact_norm)):
        assert a.dtype==torch.float32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5*b.abs().max().item())

def test_what_a_norm_is():
    for make,_ in norms.values(): assert is_norm(make())
    assert is_norm(nn.LazyBatchNorm2d())
    assert all(issubclass(t, norm_types) for t in (nn.SyncBatchNorm, nn.RMSNorm, BatchNorm1dFlat, Whiten))
    assert not any(is_norm(m) for m in (nn.Linear(2,2), nn.LazyLinear(2), LinBnDrop(2,2), nn.Sequential(nn.LayerNorm(2)), nn.Dropout()))
    for bad in (nn.Linear(2,2), 'Norm', int):
        with pytest.raises(TypeError, match='register_norm'): register_norm(bad)

def test_norm_keeps_the_dtype_of_its_input():
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4,4))
    seen = []
    net[0].register_forward_hook(lambda m,i,k,o: seen.append(((*i,*k.values())[0].dtype, o.dtype)), with_kwargs=True)
    x = torch.randn(3,4)
    with half_forward(net):
        net(x)
        net(x.half())
        net(x.double().float().bfloat16().half())
        net[0](input=x.half())
    assert seen==[(torch.float32,)*2, (torch.float16,)*2, (torch.float16,)*2, (torch.float16,)*2]

def test_norm_called_by_its_forward():
    net = Net(lambda s,x: s.norm.forward(x), norm=MyRMSNorm(16))
    x = (torch.randn(4,16)*3000).half()
    with half_forward(net): out = net(x)
    assert out.float().abs().max()>0.5

def test_checkpointed_norms_recompute_what_ran():
    def block(): return nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8), MyRMSNorm(8), nn.BatchNorm1d(8), nn.Linear(8,8))
    def net(f): return Net(f, stem=nn.Linear(8,8), block=block())
    ref = run(lambda: net(lambda s,x: s.block(s.stem(x))), vec, half_forward, torch.float16)
    for reentrant in (True,False):
        again = partial(checkpoint, use_reentrant=reentrant)
        same(ref, run(lambda again=again: net(lambda s,x: again(s.block, s.stem(x))), vec, half_forward, torch.float16, inside=True))

# --- weights are fp32 masters in a forward pass, too

class Adapts(nn.Module):
    "Inner steps in its forward pass, as in MAML: what it returns is how far they moved"
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8,16), nn.Tanh(), nn.Linear(16,1))
    def forward(self, x):
        ps = dict(self.net.named_parameters())
        for _ in range(3):
            loss = torch.func.functional_call(self.net, ps, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(ps.values()), create_graph=True)
            ps = {k: p-1e-4*g for (k,p),g in zip(ps.items(), grads)}
        return torch.stack([(p-q).norm() for p,q in zip(ps.values(), self.net.parameters())])

def test_inner_steps_on_the_parameters_move_as_far_as_in_fp32():
    torch.manual_seed(0)
    net,x = Adapts(),vec()
    with half_forward(net): moved = net(x)
    with torch.autocast('cpu', torch.float16): ref = net(x)
    assert torch.equal(moved, ref)
    torch.testing.assert_close(moved, net(x), rtol=2e-2, atol=0)

def test_a_penalty_on_weights_in_the_forward_pass_does_not_overflow():
    net = Net(lambda s,x: (s.big(x), s.big.weight.square().sum()), big=nn.Linear(512,512))
    nn.init.normal_(net.big.weight, std=0.55)
    with half_forward(net): _,penalty = net(torch.randn(2,512))
    assert penalty.dtype==torch.float32 and penalty>7e4 and torch.equal(penalty, net.big.weight.square().sum())

def test_a_copy_in_the_forward_pass_is_made_of_masters():
    def f(s, x):
        s.f.seen = copy.deepcopy(s.net)
        return s.net(x)
    net = Net(f, net=nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8)))
    with half_forward(net, keep_fp32='net.0'): net(vec())
    assert not any('forward' in vars(m) for m in f.seen.modules())
    assert all(map(torch.equal, f.seen.parameters(), net.net.parameters())) and f.seen[0].weight.dtype==torch.float32

def test_the_gradient_of_one_weight_runs_no_other_layer_backward():
    net,ran = nn.Sequential(*[nn.Linear(8,8) for _ in range(6)]),[]
    with half_forward(net): out = net(vec())
    for i,m in enumerate(net): m.weight.register_hook(lambda g, i=i: ran.append(i))
    node,names = out.grad_fn,[]
    while node is not None: # all matmuls, from the last one on
        node.register_hook(partial(lambda name, *args: names.append(name), node.name()))
        node = next((o for o,_ in node.next_functions[1:2]), None)
    torch.autograd.grad(out.float().sum(), net[-1].weight)
    assert ran==[5] and len(names)==1

def test_another_thread_finds_masters_in_the_middle_of_a_pass():
    inside,seen = threading.Event(),threading.Event()
    def f(s, x):
        x = s.lin(x)
        inside.set()
        assert seen.wait(60)
        return x
    net,states = Net(f, lin=nn.Linear(8,8)),[]
    def save():
        assert inside.wait(60)
        states.append({k: v.clone() for k,v in net.state_dict().items()})
        seen.set()
    t = threading.Thread(target=save)
    t.start()
    with half_forward(net): net(vec())
    t.join()
    assert all(v.dtype==torch.float32 and torch.equal(v, net.state_dict()[k]) for k,v in states[0].items())

def test_the_fast_path_of_transformers_is_refused_for_this_thread_only():
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    other = []
    with half_forward(net):
        assert torch.backends.mha.get_fastpath_enabled() and torch.is_autocast_enabled('cuda')
        t = threading.Thread(target=lambda: other.append(torch.is_autocast_enabled('cuda')))
        t.start()
        t.join()
    assert other==[False] and not torch.is_autocast_enabled('cuda')

# --- keep_fp32

class SE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc,self.gate = nn.Linear(8,8),nn.Sigmoid()
    def forward(self, x): return x*self.gate(self.fc(x))

def deep(): return nn.Sequential(nn.Linear(8,8), nn.Sequential(SE(), nn.Linear(8,8)), SE())

@pytest.mark.parametrize('keep,names', [(SE, ['1.0','2']), ('*.0', ['1.0']), ('1', ['1']), (['2','0'], ['0','2']),
    (nn.Sigmoid, ['1.0.gate','2.gate']), (lambda n,m: n.endswith('fc'), ['1.0.fc','2.fc']), ((SE,'0'), ['0','1.0','2']), (L('0'), ['0'])])
def test_keep_fp32(keep, names):
    net = deep()
    assert sorted(find_modules(net, keep))==names
    def out_dtypes(m, args, out): res[mod_name[m]] = args[0].dtype,out.dtype,{p.dtype for p in m.parameters()}
    mod_name,res = {m:n for n,m in net.named_modules()},{}
    for m in net.modules(): m.register_forward_hook(out_dtypes)
    with half_forward(net, keep_fp32=keep): net(torch.randn(3,8))
    for n in names: assert res[n][1]==torch.float32 and res[n][2]<={torch.float32}
    inside = lambda n: any(n==o or n.startswith(o+'.') for o in names)
    for n,m in net.named_modules():
        if isinstance(m, nn.Linear): assert res[n][1:]==(torch.float32 if inside(n) else torch.float16, {torch.float32})

def test_keep_fp32_of_containers_that_are_not_called():
    for container in (lambda *l: nn.ModuleList(l), nn.Sequential):
        net = nn.Module()
        net.layers = container(nn.Linear(4,4), nn.Sequential(nn.Linear(4,4), nn.LayerNorm(4)))
        seen = []
        for m in net.modules(): m.register_forward_hook(lambda m,i,o, seen=seen: seen.append((o.dtype, {p.dtype for p in m.parameters()})))
        with half_forward(net, keep_fp32='layers'):
            x = torch.randn(2,4)
            for l in net.layers: x = l(x)
        assert len(seen)==4 and all(o==(torch.float32,{torch.float32}) for o in seen)

def test_evaluation_between_a_checkpointed_forward_and_its_backward():
    def loss(between):
        torch.manual_seed(0)
        net,x = nn.Sequential(nn.Linear(4,4), nn.Sequential(nn.LayerNorm(4), MyRMSNorm(4))),torch.randn(3,4)
        with half_forward(net):
            out = checkpoint(net[1], net[0](x), use_reentrant=False)
            if between:
                with torch.no_grad(), half_forward(net): net(x)
            out.float().pow(2).sum().backward()
        return [p.grad for p in net.parameters()]
    same(loss(False), loss(True))

def test_keep_fp32_module_itself():
    net = deep()
    assert list(find_modules(net, net[1][0]))==['1.0'] and list(find_modules(net, '*'))[0]=='0'
    assert list(find_modules(net, [net[2], net[0]]))==['2','0']

def test_keep_fp32_is_fp32():
    "A kept module gives fp32's result, to the bit"
    net,x = deep(),torch.randn(3,8)
    with half_forward(net, keep_fp32=net): out = net(x)
    assert torch.equal(out, net(x))

@pytest.mark.parametrize('keep,near', [('1.0.fx', '1.0.fc'), (nn.SiLU, 'Sigmoid'), (nn.Linear(1,1), 'Linear'), (lambda n,m: False, 'SE'),
                                       (['0','sigmoid'], 'Sigmoid')])
def test_keep_fp32_without_match(keep, near):
    with pytest.raises(ValueError) as e: half_forward(deep(), keep_fp32=keep)
    assert 'matches no module' in str(e.value) and near in str(e.value)

def test_a_batch_norm_that_became_a_synchronized_one_is_not_found():
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2,2), nn.BatchNorm1d(2)))
    with pytest.raises(ValueError, match='keep_fp32=.*BatchNorm1d.* matches no module .*near matches: SyncBatchNorm'):
        half_forward(net, keep_fp32=nn.BatchNorm1d)

@pytest.mark.parametrize('name,cls', [('Linear','nn.Linear'), ('nn.Linear','nn.Linear'), ('LSTM','nn.LSTM'), ('SE','SE')])
def test_keep_fp32_of_the_name_of_a_class(name, cls):
    "Of torch's or of the model's, in a list or not"
    for keep in (name, ['0',name]):
        with pytest.raises(ValueError) as e: half_forward(deep(), keep_fp32=keep)
        assert str(e.value)==f'keep_fp32={name!r} matches no module of this Sequential: pass the class {cls}, not its name.'

def test_a_module_may_have_the_name_of_a_class():
    model = nn.ModuleDict({'Linear': nn.Linear(1,1)})
    assert find_modules(model, 'Linear')=={'Linear': model['Linear']}

def test_data_parallel_names_the_way_out():
    model = nn.DataParallel(deep())
    half_forward(model)
    model.device_ids = [0,1] # as on a machine with two GPUs
    with pytest.raises(ValueError) as e: half_forward(model)
    assert 'over 2 devices' in str(e.value) and 'learn.distrib_ctx()' in str(e.value)
    assert re.search(r'examples/\w+\.py', str(e.value))[0]=='examples/train_distributed.py'

def test_keep_fp32_of_something_else():
    with pytest.raises(TypeError, match='keep_fp32 takes modules'): half_forward(deep(), keep_fp32=3)

# --- what is left behind

class Raises(nn.Module):
    def __init__(self, e):
        super().__init__()
        self.e = e
    def forward(self, x): raise self.e

def untouched(net, params):
    assert [*map(id, net.parameters())]==[*map(id, params)] and all(p.dtype==torch.float32 and isinstance(p, nn.Parameter) for p in params)
    assert not torch.is_autocast_enabled('cpu') and torch.backends.mha.get_fastpath_enabled()

@pytest.mark.parametrize('e', [KeyboardInterrupt, RuntimeError('CUDA out of memory'), ValueError('any')])
@pytest.mark.parametrize('kept', [False, True])
def test_exceptions_leave_nothing_behind(e, kept):
    net = nn.Sequential(nn.Linear(4,4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4,4), nn.LayerNorm(4), Raises(e)))
    params,names = list(net.parameters()),list(net.state_dict())
    with pytest.raises(e if isinstance(e, type) else type(e)):
        with half_forward(net, keep_fp32='2' if kept else None): net(torch.randn(3,4))
    untouched(net, params)
    gc.collect() # the traceback held the graph
    assert list(net.state_dict())==names and not any('forward' in m.__dict__ for m in net.modules())
    net[2][2] = nn.Identity()
    x = torch.randn(3,4)
    ref = copy.deepcopy(net)
    assert torch.equal(net(x), ref(x))
    pickle.loads(pickle.dumps(net))

def test_exception_caught_inside_the_model():
    "What goes on after it is still in half precision, with norms in fp32"
    def f(s, x):
        try: s.bad(x)
        except ValueError: pass
        return s.norm(s.lin(x))
    net = Net(f, bad=nn.Sequential(nn.LayerNorm(4), Raises(ValueError())), norm=MyRMSNorm(4), lin=nn.Linear(4,4))
    seen = []
    net.lin.register_forward_hook(lambda m,i,o: seen.append(o.dtype))
    with half_forward(net, keep_fp32='bad'): net(torch.randn(3,4))
    assert seen==[torch.float16]

def test_patches_end_with_the_context():
    net,x = nn.Sequential(nn.Linear(4,4), nn.LayerNorm(4)),torch.randn(3,4)
    with half_forward(net):
        a = net(x)
        assert 'forward' in net[1].__dict__
    assert 'forward' not in net[1].__dict__ and a.grad_fn is not None

def test_own_forward_of_an_instance_is_kept():
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4,4))
    mine = lambda x: x*2
    net[0].forward = net[1].forward = mine
    with half_forward(net): assert torch.equal(net(torch.ones(2,4)), torch.full((2,4),4.))
    gc.collect()
    assert net[0].forward is mine and net[1].forward is mine

def test_weights_edited_between_forwards():
    "Those of this moment are cast, and none of them leaves its module"
    net,x = nn.Linear(4,4, bias=False),torch.eye(4)
    plan,weight = PrecisionPlan(net),net.weight
    for v in (1.,2.,1/3):
        net.weight.data.fill_(v)
        with plan.forward_pass():
            assert net.weight is weight and weight.dtype==torch.float32
            assert torch.equal(net(x), torch.full((4,4), v).half())

def test_evaluation_of_a_transformer_with_padding():
    "torch's fast path for transformers raises under CPU autocast"
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x,pad = torch.randn(2,5,16),torch.tensor([[0,0,0,0,1],[0,0,0,1,1]]).bool()
    with torch.no_grad():
        ref = net(x, src_key_padding_mask=pad)
        with half_forward(net): out = net(x, src_key_padding_mask=pad)
    torch.testing.assert_close(out.float()[~pad], ref[~pad], rtol=0.02, atol=0.02)

def test_other_dtypes_pass_through():
    net = Net(lambda s,x: s.lin(x)*s.d.to(x.dtype)+s.c.real, lin=nn.Linear(4,4), dbl=nn.Linear(4,4).double())
    net.d = nn.Parameter(torch.tensor(2., dtype=torch.float64))
    net.register_buffer('c', torch.ones(4, dtype=torch.complex64))
    with half_forward(net): 
        assert net.dbl.weight.dtype==torch.float64
        out = net(torch.randn(2,4))
    out.float().sum().backward()
    assert net.d.dtype==net.d.grad.dtype==torch.float64 and net.c.dtype==torch.complex64

def test_lazy_modules():
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4,2))
    for _ in range(2):
        with half_forward(net): out = net(torch.randn(3,5))
    assert out.dtype==torch.float16

@pytest.mark.parametrize('backend', ['eager','aot_eager'])
def test_compiled(backend): # `fullgraph` raises where the graph breaks
    torch._dynamo.reset() # and where other tests have compiled the same code too often
    def net(): return nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8,4))
    ref = run(net, vec, half_forward, torch.float16)
    same(ref, run(lambda: torch.compile(net(), backend=backend, fullgraph=True), vec, half_forward, torch.float16))

def test_a_module_without_weights_to_cast():
    net = nn.Sequential(nn.LayerNorm(4))
    with half_forward(net): net(torch.ones(2,4).half()).sum().backward()
    assert net[0].weight.grad is not None

def test_gradients_of_large_weights_do_not_wait_for_each_other():
    "Those of the last layer are in fp32 already, and their half-precision ones free, when the first layer's are computed"
    net,there = nn.Sequential(*[nn.Linear(2600, 2600, bias=False) for _ in range(3)]),[] # 26 MiB each
    for i,m in enumerate(net): m.weight.register_post_accumulate_grad_hook(lambda p, i=i: there.append(f'grad {i}'))
    for i,m in enumerate(net): m.register_full_backward_hook(lambda m, gi, go, i=i: there.append(f'layer {i}'))
    x = torch.randn(1, 2600, requires_grad=True)
    with half_forward(net, torch.bfloat16): out = net(x)
    out.sum().backward()
    assert there.index('grad 2')<there.index('layer 1') and there.index('grad 1')<there.index('layer 0') and len(there)==6
    ref = copy.deepcopy(net)
    ref.zero_grad()
    with torch.autocast('cpu', torch.bfloat16): ref(x).sum().backward()
    for a,b in zip(net.parameters(), ref.parameters()): assert torch.equal(a.grad, b.grad)

# --- bad input

@pytest.mark.parametrize('make,says', [(lambda: PrecisionPlan(nn.ReLU()), 'ReLU has no parameters'),
    (lambda: PrecisionPlan(nn.Sequential(nn.Linear(2,2).half())), '0.weight is torch.float16'),
    (lambda: PrecisionPlan(nn.Linear(2,2).bfloat16()), 'weight is torch.bfloat16'),
    (lambda: PrecisionPlan(nn.Linear(2,2), torch.float32), 'dtype=torch.float32'),
    (lambda: PrecisionPlan(nn.Linear(2,2, device='meta')), "'meta'")])
def test_bad_input(make, says):
    with pytest.raises(ValueError) as e: make()
    assert says in str(e.value) and '\n' not in str(e.value)

class Own(nn.Module):
    "Code of its own between children, one of them a norm, one checkpointed"
    def __init__(self, fail=False):
        super().__init__()
        self.inp,self.norm,self.out = nn.Linear(8,8),nn.LayerNorm(8),nn.Linear(8,8)
        self.mid = nn.Sequential(nn.Linear(8,8), Dtypes(), nn.Tanh())
        self.weight,self.fail,self.seen = nn.Parameter(torch.eye(8)),fail,[]
    def forward(self, x):
        if self.fail: raise ValueError('now')
        h = self.inp(x)@self.weight*1e6*1e-6
        h = h+checkpoint(self.mid, h, use_reentrant=False)
        n = self.norm(h)
        self.seen += [h.dtype, n.dtype, self.out.weight.dtype]
        return self.out(n)

class Dtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []
    def forward(self, x):
        self.seen.append(x.dtype)
        return x

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_own_code_in_fp32_and_children_in_half(dtype):
    "A name with a dot at its end: gradients are those of fp32 code around half-precision children, also where a checkpoint computes again"
    torch.manual_seed(0)
    outer,x = nn.Sequential(Own(), nn.Linear(8,1)),torch.randn(4,8)
    model = outer[0]
    with half_forward(outer, dtype, ['0.']):
        y = outer(x)
        assert y.dtype==dtype and y.isfinite().all() and model.seen==[torch.float32]*3
        y.float().sum().backward()
    assert model.mid[1].seen==[dtype,dtype] # forward, and again in the backward pass
    grads = [p.grad.clone() for p in outer.parameters()]
    outer.zero_grad()
    outer(x).sum().backward()
    for g,p in zip(grads, outer.parameters()): assert (g-p.grad).norm()<=16*torch.finfo(dtype).eps*p.grad.norm() # of a chain of five layers
    with half_forward(model, dtype, '.'): assert model(x).dtype==torch.float32
    model.mid[1].seen.clear()
    with half_forward(model, dtype, ['.','mid','out.']): model(x)
    assert model.mid[1].seen==[torch.float32] and model.seen[-1]==torch.float32 # a child that is kept, and a layer without children

def test_own_code_of_all_blocks_leaves_their_layers_in_half():
    "`*` in the name of own code does not match what is inside the blocks"
    net,x = nn.ModuleDict({'blocks': nn.Sequential(SE(), SE())}),torch.randn(3,8)
    def dtypes(keep):
        seen = {}
        hooks = [m.register_forward_hook(lambda m,i,o,n=n: seen.update({n: o.dtype})) for n,m in net.named_modules() if n]
        with half_forward(net, keep_fp32=keep): net['blocks'](x)
        for h in hooks: h.remove()
        return seen
    each = dtypes(['blocks.0.','blocks.1.'])
    assert dtypes('blocks.*.')==each and each['blocks.0']==torch.float32
    plan = PrecisionPlan(net, keep_fp32='blocks.*.')
    assert list(plan.own_code)==['blocks.0','blocks.1'] and not plan.kept
    deep = nn.ModuleDict({'attn': SE(), 'stage': nn.ModuleDict({'attn': SE(), 'more': nn.ModuleDict({'attn': SE()})})})
    assert list(PrecisionPlan(deep, keep_fp32='*attn.').own_code)==['attn','stage.attn','stage.more.attn']

def test_own_code_elsewhere_is_as_ever():
    "In fp32 while a graph lives, and after an exception"
    model,x = Own(),torch.randn(4,8)
    with half_forward(model, keep_fp32='.'): y = model(x)
    model.mid[1].seen.clear()
    model(x)
    assert model.mid[1].seen==[torch.float32] and y.requires_grad
    del y
    plan = PrecisionPlan(model, keep_fp32='.')
    model.fail = True
    with pytest.raises(ValueError, match='now'), plan.forward_pass(): model(x)
    assert torch.is_autocast_cache_enabled() and not torch.is_autocast_enabled('cpu')
    with pytest.raises(ValueError, match='matches no module'): half_forward(model, keep_fp32='nowhere.')
    assert list(PrecisionPlan(model, keep_fp32='').kept)[0]=='' and '' not in PrecisionPlan(model, keep_fp32='*').kept

# Two plans for one model, while a graph of the first one lives

def three():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,8), nn.LayerNorm(8), nn.Linear(8,8), nn.GELU(), nn.Linear(8,4))

def passed(net, keep, x):
    with half_forward(net, keep_fp32=keep): return net(x)

kept = [None, '0', '4', ['0','2','4'], '2.']

@pytest.mark.parametrize('first', kept, ids=str)
@pytest.mark.parametrize('second', kept, ids=str)
def test_each_pass_has_its_own_plan(first, second):
    x = torch.randn(4, 8)
    a,b = passed(three(), first, x),passed(three(), second, x)
    net = three()
    held = passed(net, first, x)
    res = passed(net, second, x)
    again = passed(net, first, x)
    for got,alone in ((held,a), (res,b), (again,a)): assert got.dtype==alone.dtype and torch.equal(got, alone)
    del got,held,res,again
    gc.collect()
    assert not any('forward' in vars(m) for m in net.modules())

@pytest.mark.parametrize('second', kept, ids=str)
def test_a_checkpoint_is_recomputed_as_it_was_after_a_pass_with_another_plan(second):
    x = torch.randn(4, 8)
    def grads(between):
        net = three()
        with half_forward(net, keep_fp32='2'):
            held = checkpoint(net, x, use_reentrant=False)
            if between: passed(net, second, x)
            held.float().square().mean().backward()
        return [p.grad for p in net.parameters()]
    assert all(map(torch.equal, grads(True), grads(False)))

def test_plans_that_take_turns_leave_nothing_behind():
    "Each makes several passes whose graphs live, and lets go of them in any order"
    x,net = torch.randn(4, 8),three()
    plans = [PrecisionPlan(net, keep_fp32=o) for o in kept]
    alone = [passed(three(), o, x) for o in kept]
    held = []
    for i in (0,1,0,2,1,3,4,0,2):
        with plans[i].forward_pass(): held.append(net(x))
        assert held[-1].dtype==alone[i].dtype and torch.equal(held[-1], alone[i])
    for i in (4,0,5,2,1,0,2,1,0): del held[i]
    assert not held and not any({'forward','__reduce_ex__'} & {*vars(m)} for m in net.modules())

class Bad:
    def __call__(self, name, module): raise TypeError('my own')

@pytest.mark.parametrize('keep_fp32,got', [(lambda m: True, 'a function of (m)'), (lambda: True, 'a function of ()'),
    (lambda a,b,c: True, 'a function of (a, b, c)'), (slice(0, 2), 'slice(0, 2, None)'), (np.zeros(2), 'array('),
    (torch.zeros(2), 'tensor('), ([torch.zeros(2)], 'tensor('), ((o for o in ['0']), '<generator')])
def test_what_keep_fp32_cannot_be_is_named(keep_fp32, got):
    learn = learner()
    with pytest.raises(TypeError, match=r'^keep_fp32 takes modules, .*\(name, module\) -> bool, and got '+re.escape(got)):
        learn.to_fp16_dynamic(keep_fp32=keep_fp32)
    assert not hasattr(learn, 'mixed_precision')

def test_a_predicate_of_two_arguments_raises_its_own_errors():
    with pytest.raises(TypeError, match='^my own$'): learner().to_fp16_dynamic(keep_fp32=Bad())
    for f in (lambda n,m,k=1: n=='0', lambda *args: args[0]=='0', partial(lambda a,n,m: n=='0', 1)):
        assert learner().to_fp16_dynamic(keep_fp32=f).mixed_precision.make_plan(mlp()).in_fp32
