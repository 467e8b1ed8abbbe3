"CUDA's rules of dispatch and autocast, on tensors that have device, dtype and layout but no data: no GPU is needed"
import pytest,torch
import torch.nn.functional as F
from fastai.basics import Adam,DataLoaders,Learner,Recorder,Tensor,nn
from fastai_amp16.train import ranks as ranks_module
from fastai_amp16.all import AdamW16,FusedAdam,GradientNormClip,half_forward
from benchmarks.speed.cuda_dispatch import Kernels,contenders,fake_cuda,models,not_here,tensors

pytestmark = [pytest.mark.skipif(bool(not_here), reason=str(not_here)), pytest.mark.cpu_only("the tensors are fake")]
f16,f32 = torch.float16,torch.float32
both = pytest.mark.parametrize('dtype', [f16,torch.bfloat16], ids=str)

# %% norms
image,rows = (2,8,4,4),(2,8,4)
norms = { # the shape of a batch, and whether the kernel of this norm reads half precision
    nn.BatchNorm1d(8): (rows, True), nn.BatchNorm2d(8): (image, True), nn.BatchNorm3d(8): ((2,8,4,4,4), True),
    nn.BatchNorm2d(8, affine=False): (image, True), nn.BatchNorm2d(8, track_running_stats=False): (image, True),
    nn.BatchNorm2d(8).eval(): (image, True),
    nn.InstanceNorm1d(8): (rows, True), nn.InstanceNorm2d(8): (image, True), nn.InstanceNorm3d(8, affine=True): ((2,8,4,4,4), True),
    nn.InstanceNorm2d(8, affine=True, track_running_stats=True): (image, True),
    nn.LayerNorm(4, elementwise_affine=False): (rows, True), nn.LayerNorm(4): (rows, False), nn.LayerNorm(4, bias=False): (rows, False),
    nn.GroupNorm(2, 8): (image, False), nn.GroupNorm(2, 8, affine=False): (image, False),
    nn.RMSNorm(4): (rows, False), nn.RMSNorm(4, elementwise_affine=False): (rows, False),
    nn.LocalResponseNorm(2): (image, False), nn.CrossMapLRN2d(2): (image, False)}

class Between(nn.Module):
    "A norm that gets half precision, as after a linear layer"
    def __init__(self, norm):
        super().__init__()
        self.lin,self.norm = nn.Linear(4, 4),norm
    def forward(self, x): return self.norm(self.lin(x))

def after_linear(ops):
    "What the norm has launched"
    at, = [i for i,(f,*_) in enumerate(ops) if 'mm' in f._opname]
    return ops[at+1:]

def floats(o): return {t.dtype for t in tensors(o) if t.is_floating_point() and t.numel()}

@both
@pytest.mark.parametrize('norm', norms, ids=repr)
def test_what_a_norm_reads_and_returns(norm, dtype):
    "In fp32, or by a kernel that reads half precision, with fp32 weights and statistics, and without a cast"
    shape,reads_half = norms[norm]
    model = Between(norm)
    with fake_cuda(model):
        with Kernels() as seen, half_forward(model, dtype): out = model(torch.empty(shape, device='cuda'))
        ops = after_linear(seen.ops)
        assert out.dtype==dtype and out.device.type=='cuda' and {p.dtype for p in model.parameters()}=={f32}
        casts = [o for o in ops if o[0]._opname=='_to_copy']
        if not reads_half:
            assert floats(casts[0][3])=={f32} and floats(casts[-1][3])=={dtype} # up, and down again at the end
            assert all(floats(o)=={f32} for o in ops if o[0]._opname!='_to_copy')
            return
        kernel, = [o for o in ops if 'norm' in o[0]._opname]
        assert not casts and kernel[1][0].dtype==dtype==kernel[3][0].dtype
        assert floats((kernel[1][1:],kernel[3][1:]))<={f32} # weights, and the statistics that the backward pass reads

@pytest.mark.parametrize('norm', [o for o,(_,reads_half) in norms.items() if reads_half], ids=repr)
def test_a_norm_that_is_kept_gets_and_returns_fp32(norm):
    shape,_ = norms[norm]
    model = Between(norm)
    with fake_cuda(model):
        with Kernels() as seen, half_forward(model, keep_fp32=norm): out = model(torch.empty(shape, device='cuda'))
        assert out.dtype==f32 and all(floats(o)=={f32} for o in after_linear(seen.ops) if 'norm' in o[0]._opname)

class OwnNorm(nn.BatchNorm2d):
    "Code of its own needs fp32, whatever class it derives from"
    def forward(self, x): return super().forward(x*x)

def test_a_norm_with_code_of_its_own_is_in_fp32():
    model = Between(OwnNorm(8))
    with fake_cuda(model):
        with Kernels() as seen, half_forward(model): model(torch.empty(image, device='cuda'))
        assert [floats(o) for o in after_linear(seen.ops) if o[0]._opname=='mul']==[{f32}]

# %% optimizers
def test_averages_that_were_loaded_onto_the_cpu_go_to_their_parameters():
    "`learn.load` leaves them there if the `DataLoaders` have no device"
    with fake_cuda(model := nn.Linear(4, 4)):
        ps = list(model.parameters())
        opt = FusedAdam(ps, lr=0.1)
        saved = opt.state_dict()
        state = [dict(step=3, grad_avg=torch.empty(p.shape), sqr_avg=torch.empty(p.shape)) for p in ps]
        opt.load_state_dict({**saved, 'state':state})
        for p in ps: p.grad = torch.empty_like(p)
        for _ in range(2): opt.step()
        averages = [opt.state[p][k] for p in ps for k in ('grad_avg','sqr_avg')]
        assert {t.device.type for t in averages}=={'cuda'} and {opt.state[p]['step'] for p in ps}=={5}

# %% autocast's lists
half_ops = dict(
    linear=lambda x: F.linear(x, x), matmul=lambda x: x@x, mm=lambda x: torch.mm(x, x), mv=lambda x: x.mv(x[0]),
    bmm=lambda x: x[None].bmm(x[None]), einsum=lambda x: torch.einsum('ij,jk', x, x), addmm=lambda x: torch.addmm(x, x, x),
    baddbmm=lambda x: torch.baddbmm(x[None], x[None], x[None]), conv1d=lambda x: F.conv1d(x[None], x[...,None]),
    conv2d=lambda x: F.conv2d(x[None,...,None], x[...,None,None]), prelu=lambda x: F.prelu(x, x[0]),
    conv_transpose2d=lambda x: F.conv_transpose2d(x[None,...,None], x[...,None,None]),
    attention=lambda x: F.scaled_dot_product_attention(x[None,None], x[None,None], x[None,None]))
fp32_ops = dict(
    exp=torch.exp, log=torch.log, pow=lambda x: x.pow(2), rsqrt=torch.rsqrt, softmax=lambda x: x.softmax(-1), sum=torch.sum,
    prod=torch.prod, log_softmax=lambda x: x.log_softmax(-1), cumsum=lambda x: x.cumsum(0), softplus=F.softplus, norm=lambda x: x.norm(),
    cdist=lambda x: torch.cdist(x, x), layer_norm=lambda x: F.layer_norm(x, x.shape[1:]), group_norm=lambda x: F.group_norm(x, 2),
    cosine_similarity=lambda x: F.cosine_similarity(x, x), cross_entropy=lambda x: F.cross_entropy(x, x),
    mse_loss=lambda x: F.mse_loss(x, x), l1_loss=lambda x: F.l1_loss(x, x), bce=lambda x: F.binary_cross_entropy_with_logits(x, x))
widest_ops = dict(
    addcmul=torch.addcmul, addcdiv=torch.addcdiv, atan2=lambda x,y,z: torch.atan2(x, y), dot=lambda x,y,z: x[0].dot(y[0]),
    bilinear=lambda x,y,z: F.bilinear(x, y, z[None].expand(4,-1,-1)), cross=lambda x,y,z: torch.cross(x[:,:3], y[:,:3], dim=1),
    tensordot=lambda x,y,z: torch.tensordot(x, y),
    grid_sample=lambda x,y,z: F.grid_sample(x[None,None], y[:,:2][None,None], align_corners=False),
    scatter_add=lambda x,y,z: x.scatter_add(0, torch.zeros(4, 4, dtype=torch.long, device=x.device), y))

class Op(nn.Module):
    "An operation on what the model is given"
    def __init__(self, op):
        super().__init__()
        self.lin,self.op = nn.Linear(4, 4),op
    def forward(self, *xs): return self.op(*xs)

def by_op(op, *dtypes):
    "Dtypes of the result: by ours, and by plain autocast"
    model = Op(op)
    with fake_cuda(model):
        xs = [torch.empty(4, 4, device='cuda', dtype=o) for o in dtypes]
        def res(context):
            with context: return model(*xs).dtype
        return res(half_forward(model)),res(torch.autocast('cuda', f16))

@pytest.mark.parametrize('op', half_ops.values(), ids=half_ops)
@pytest.mark.parametrize('given', [f16,f32], ids=str)
def test_operations_in_half_precision(op, given): assert by_op(op, given)==(f16,f16)

@pytest.mark.parametrize('op', fp32_ops.values(), ids=fp32_ops)
@pytest.mark.parametrize('given', [f16,f32], ids=str)
def test_operations_in_fp32(op, given): assert by_op(op, given)==(f32,f32)

@pytest.mark.parametrize('op', widest_ops.values(), ids=widest_ops)
@pytest.mark.parametrize('given', [(f16,f16,f16),(f16,f32,f16),(f32,f32,f32)], ids=str)
def test_operations_in_the_widest_of_their_dtypes(op, given): assert by_op(op, *given)==(max(given, key=lambda o: o.itemsize),)*2

# %% whole models
@pytest.mark.parametrize('name', ['EfficientNet-B0','RMS norm MLP'])
def test_ours_launches_no_more_casts_and_nothing_else(name):
    "Without its casts, a forward pass launches what fp32 does; fastai's `to_fp16` launches what autocast does"
    make,inputs = models[name]
    with fake_cuda(model := make().train()):
        fp32,autocast,fastais,ours = [f(model, inputs().cuda()).count() for f in contenders.values()]
    assert autocast==fastais and ours[1]<=autocast[1] and fp32[1]==0
    assert fp32[0]==ours[0]-ours[1]==autocast[0]-autocast[1]

def convs(layout=torch.channels_last):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8),
              nn.SiLU(), nn.Conv2d(8, 8, 1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
    return nn.Sequential(*layers).to(memory_format=layout)

def test_channels_last_is_kept():
    "By the casts of weights, by those around norms, and so by all that follows"
    def is_last(t): return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
    with fake_cuda(model := convs()):
        x = torch.empty(2, 3, 8, 8, device='cuda').to(memory_format=torch.channels_last)
        with Kernels() as seen, half_forward(model): model(x)
        large = [(f,t) for f,args,_,res in seen.ops for t in tensors((args[:1],res)) if t.ndim==4 and min(t.shape[1:])>1]
        assert {f._opname for f,_ in large}>={'convolution','_to_copy','silu','max_pool2d_with_indices'}
        assert all(is_last(t) for f,t in large), [(f,t.stride()) for f,t in large if not is_last(t)]
        weights = [p.shape for p in model.parameters()]
        casts = [res for f,_,_,res in seen.ops if f._opname=='_to_copy' and res.shape not in weights]
        assert len(casts)==3 # the input; up and down at the group norm
        assert 'clone' not in {f._opname for f,*_ in seen.ops}

class Reads(list):
    "What is read from the GPU, all of it finite: devices and numbers of each read"
    def __call__(self, os, group=None, device=None):
        self.append([t.device.type for t in tensors(os)])
        return [0.]*len(os)

def crosses(op):
    "Does an operation take tensors to another device, or has it such of two? A number from the CPU may be an argument of a kernel"
    f,args,kwargs,res = op
    to = {t.device.type for t in tensors(res)}
    return len(to)>1 or any(t.device.type not in to and (t.ndim or f._opname in ('_to_copy','copy_')) for t in tensors((args,kwargs)) if to)

@pytest.mark.usefixtures('uncompared')
@pytest.mark.parametrize('opt_func', [AdamW16,FusedAdam,Adam], ids=lambda o: getattr(o, '__name__', 'AdamW16'))
def test_a_step_stays_on_the_gpu_and_reads_once(opt_func, monkeypatch):
    """From the batch to the step of the optimizer no tensor travels between CPU and GPU, and the host asks once what came out

    A fake tensor raises where its data would be read."""
    monkeypatch.setattr(ranks_module, 'read_all', reads := Reads()) # the one thing that needs data
    model = convs()
    def backward(loss):
        "Autograd's engine needs a GPU: gradients as it would leave them"
        for p in model.parameters(): p.grad = torch.empty_like(p)
    monkeypatch.setattr(Tensor, 'backward', backward)
    with fake_cuda(model):
        x,y = torch.empty(2, 3, 8, 8, device='cuda'),torch.zeros(2, dtype=torch.long, device='cuda')
        learn = Learner(DataLoaders([(x,y)]*4, []), model, nn.CrossEntropyLoss(), opt_func, cbs=GradientNormClip(1.)).to_fp16_dynamic()
        learn.remove_cb(Recorder) # it reads the loss
        with learn.no_bar(), learn.no_logging(), Kernels() as seen: learn.fit(1, 1e-3)
        assert len(learn.mixed_precision.history)==len(reads)==4 and {o for os in reads for o in os}=={'cuda'}
        assert not [op for op in seen.ops if crosses(op)]
        assert all(p.device.type=='cuda' and p.dtype==f32 for p in model.parameters())
