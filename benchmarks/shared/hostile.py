"Small trainings that work in fp32 and fail in plain fp16, and two that fail in fp32, too"
import math
from collections import namedtuple
from functools import partial
import torch
import torch.nn.functional as F
from fastai.basics import SGD,DataLoader,DataLoaders,Learner,accuracy,default_device,nn,set_seed
from fastai_amp16.all import AdamW16
from fastai_amp16.demo import RegNetY

Scenario = namedtuple('Scenario', 'make epochs lr') # all metrics are at most 1: accuracy or R² on the validation set

def r2(p, t): return 1-(p-t).square().mean()/t.var(correction=0)
def r2_log(p, t): return r2(p.log(), t.log())

def learner(seed, data, model, loss_func=F.cross_entropy, metric=accuracy, opt_func=AdamW16, n=512, n_valid=256, bs=32):
    "A learner on `data(n)`, which returns inputs and targets, the last `n_valid` for validation; `seed` sets data, model and order"
    set_seed(seed, reproducible=True)
    x,y = data(n+n_valid)
    loaders = DataLoader(list(zip(x[:n], y[:n])), bs=bs, shuffle=True),DataLoader(list(zip(x[n:], y[n:])), bs=n_valid)
    dls = DataLoaders(*loaders, device=default_device())
    return Learner(dls, model(), loss_func, opt_func, metrics=metric)

def classes(n, shape=(16,), c=4, noise=0.8):
    "`n` samples of `c` classes: a prototype per class, plus noise"
    y = torch.randint(c, (n,))
    return torch.randn(c, *shape)[y]+noise*torch.randn(n, *shape),y

def curve(n, d=8, noise=0.1):
    "A function of `d` numbers with mean 0 and standard deviation 1, plus noise"
    x = torch.randn(n, d)
    return x,(x[:,:3].sum(1, keepdim=True)+x[:,3:5].abs().sum(1, keepdim=True)-1.6)/3.72**0.5+noise*torch.randn(n, 1)

# %% squeeze and excitation
def counts(n):
    "Images of a sensor that counts, with values around 60,000"
    x,y = classes(n, (4,4,4))
    return 6e4*(2+x),y

def regnety(seed): return learner(seed, counts, partial(RegNetY, 4, 8, 4))

# %% a residual stream without norms
class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin1,self.lin2 = nn.Linear(d, d),nn.Linear(d, d)
        for l in (self.lin1,self.lin2): nn.init.kaiming_normal_(l.weight)
    def forward(self, x): return x+self.lin2(F.relu(self.lin1(x)))

class NormFree(nn.Module):
    "The residual stream doubles in each block, up to about 1e6; the output of the last layer is scaled down to logits"
    def __init__(self, ni=16, d=32, c=4, depth=8, gain=3e3, out=1e-6):
        super().__init__()
        self.inp,self.blocks,self.head = nn.Linear(ni, d),nn.ModuleList([Residual(d) for _ in range(depth)]),nn.Linear(d, c)
        self.gain,self.out = gain,out
    def forward(self, x):
        x = self.inp(x)*self.gain
        for b in self.blocks: x = b(x)
        return self.head(x)*self.out

def norm_free(seed): return learner(seed, classes, NormFree)

# %% attention
class Attention(nn.Module):
    "One head of attention; `how` it applies the mask: 'add' or 'fill'"
    def __init__(self, d, how):
        super().__init__()
        self.q,self.k,self.v,self.o = [nn.Linear(d, d) for _ in range(4)]
        self.how = how
    def forward(self, x, mask):
        scores = self.q(x)@self.k(x).transpose(-2, -1)/x.shape[-1]**0.5
        if self.how=='add': scores = scores+(1-mask.to(scores.dtype))*-1e9
        else: scores = scores.masked_fill(mask==0, -1e9)
        return self.o(F.softmax(scores, dim=-1)@self.v(x))

class Decoder(nn.Module):
    "A causal decoder that masks token 0, the padding on the left; so all that padding could attend to is masked"
    def __init__(self, how, vocab=12, d=16, c=4, depth=2):
        super().__init__()
        self.emb,self.pos = nn.Embedding(vocab, d),nn.Parameter(torch.randn(8, d)*0.1)
        self.norms = nn.ModuleList([nn.LayerNorm(d) for _ in range(depth)])
        self.attns = nn.ModuleList([Attention(d, how) for _ in range(depth)])
        self.head = nn.Linear(d, c)
    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril()*(x!=0)[:,None]
        h = self.emb(x)+self.pos
        for norm,attn in zip(self.norms, self.attns): h = h+attn(norm(h), mask)
        return self.head(h[:,-1])

def sentences(n, c=4, length=8):
    "Sentences with one of `c` keywords among other words, to be classified by keyword"
    y,x = torch.randint(c, (n,)),torch.randint(1+c, 12, (n, length))
    pad = torch.randint(0, length-2, (n,))
    x[torch.arange(length)<pad[:,None]] = 0
    x[torch.arange(n),(pad+torch.rand(n)*(length-1-pad)).long()] = 1+y
    return x,y

def masked_add(seed): return learner(seed, sentences, partial(Decoder, 'add'))
def masked_fill(seed): return learner(seed, sentences, partial(Decoder, 'fill'))

class SelfAttention(nn.Module):
    "Attention whose scores are in the units of the data"
    def __init__(self, d=8, c=4):
        super().__init__()
        self.q,self.k,self.v = [nn.Linear(d, d, bias=False) for _ in range(3)]
        self.norm,self.head = nn.LayerNorm(d),nn.Linear(d, c)
    def forward(self, x):
        q,k,v = self.q(x),self.k(x),self.v(x)
        attn = F.softmax(q @ k.transpose(-2, -1) / 3e4, dim=-1)
        return self.head(self.norm(x + attn @ v).mean(1))

def large(n):
    x,y = classes(n, (6,8), noise=0.5)
    return 500*x,y

def large_logits(seed): return learner(seed, large, SelfAttention)

# %% root mean squares
class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight,self.eps = nn.Parameter(torch.ones(d)),eps
    def forward(self, x): return x*torch.rsqrt((x*x).mean(-1, keepdim=True)+self.eps)*self.weight

class NormedMLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm,self.lin1,self.lin2 = RMSNorm(d),nn.Linear(d, 2*d),nn.Linear(2*d, d)
    def forward(self, x): return self.lin2(F.relu(self.lin1(self.norm(x))))

class InlineMLP(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight,self.lin1,self.lin2,self.eps = nn.Parameter(torch.ones(d)),nn.Linear(d, 2*d),nn.Linear(2*d, d),eps
    def forward(self, x):
        x = x*torch.rsqrt((x*x).mean(-1, keepdim=True)+self.eps)*self.weight
        return self.lin2(F.relu(self.lin1(x)))

def rms(seed, block=NormedMLP):
    def data(n):
        x,y = classes(n)
        return 1000*x,y
    return learner(seed, data, lambda: nn.Sequential(nn.Linear(16, 16), block(16), nn.ReLU(), nn.Linear(16, 4)))
def rms_inline(seed): return rms(seed, InlineMLP)

# %% sums
class DeepSets(nn.Module):
    def __init__(self, d=4, c=2):
        super().__init__()
        self.phi,self.rho = nn.Sequential(nn.Linear(2, d), nn.ReLU()),nn.Sequential(nn.LayerNorm(d), nn.Linear(d, c))
    def forward(self, x): return self.rho(self.phi(x).sum(1))

def bags(n, size=70_000):
    "Bags of points, to be classified by whether the mean of their first feature is above or below 0"
    y = torch.randint(2, (n,))
    return 40*torch.randn(n, size, 2)+torch.tensor([60.,0.])*(y[:,None,None]-0.5),y

def sum_pool(seed): return learner(seed, bags, DeepSets, n=32, n_valid=32, bs=4)

# %% exp
class PoissonNet(nn.Module):
    def __init__(self, ni=8, nh=32):
        super().__init__()
        self.body,self.head = nn.Sequential(nn.Linear(ni, nh), nn.ReLU()),nn.Linear(nh, 1)
        nn.init.constant_(self.head.bias, 11.) # about the mean of the log targets
    def forward(self, x): return torch.exp(self.head(self.body(x)))

def many(n):
    x,y = curve(n)
    return x,torch.poisson(torch.exp(11+y.clamp(-3, 3)))

def poisson(seed): return learner(seed, many, PoissonNet, nn.PoissonNLLLoss(log_input=False), r2_log)

# %% cosines
class Cosine(nn.Module):
    def __init__(self, d, c, temp=10.):
        super().__init__()
        self.proto,self.temp = nn.Parameter(torch.randn(c, d)),temp
    def forward(self, x):
        x = x/(x.norm(dim=-1, keepdim=True)+1e-8)
        w = self.proto/(self.proto.norm(dim=-1, keepdim=True)+1e-8)
        return self.temp*x@w.T

def with_empty(n):
    "Classes, with each fourth training sample 0"
    x,y = classes(n)
    x[:512:4] = 0
    return x,y

def cosine(seed):
    def model(): return nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False), Cosine(16, 4))
    return learner(seed, with_empty, model)

# %% losses
def odds(n):
    "A function, with soft labels"
    x,y = curve(n, noise=0.)
    return x,(2*y).sigmoid()

class Confident(nn.Module):
    "Starts out sure that every sample is of class 1"
    def __init__(self, ni=8, nh=64):
        super().__init__()
        self.body,self.act = nn.Sequential(nn.Linear(ni, nh), nn.ReLU(), nn.Linear(nh, 1)),nn.Sigmoid()
        nn.init.constant_(self.body[2].bias, 12.)
    def forward(self, x): return self.act(self.body(x))

def sigmoid_bce(seed): return learner(seed, odds, Confident, nn.BCELoss(), r2, n=1024)

class Prices(nn.Module):
    "Learns standardized targets, and outputs them in their own unit"
    def __init__(self, ni=8, nh=32, mean=5e5, std=2e5):
        super().__init__()
        self.body,self.head = nn.Sequential(nn.Linear(ni, nh), nn.ReLU()),nn.Linear(nh, 1)
        self.mean,self.std = mean,std
    def forward(self, x): return self.head(self.body(x))*self.std+self.mean

def prices(n):
    x,y = curve(n)
    return x,2e5*y+5e5

def large_units(seed): return learner(seed, prices, Prices, nn.MSELoss(reduction='sum'), r2)

def fields(n):
    x = torch.randn(n, 8)
    return x,x.tanh()@torch.randn(8, 128)/2+0.1*torch.randn(n, 128)

def tiny_loss(seed):
    "A loss around 1e-7, a mean over 128 numbers per sample; Adam's eps is below the gradients"
    def model(): return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 128))
    return learner(seed, fields, model, lambda p,t: 1e-7*F.mse_loss(p, t), r2, partial(AdamW16, eps=1e-14), bs=64)

# %% more
def broken_pixels(seed):
    "One image in a hundred has a pixel of 1e6"
    def data(n):
        x,y = classes(n, (1,4,4))
        x[50:512:100,0,1,2] = 1e6
        return x,y
    def model(): return nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    return learner(seed, data, model)

class Magnitude(nn.Module):
    "The magnitude of complex numbers"
    def forward(self, x):
        re,im = x.chunk(2, dim=-1)
        return torch.sqrt(re*re+im*im)

class Scale(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by
    def forward(self, x): return x*self.by

def backward_only(seed):
    "Magnitudes of about 1e-4, whose squares fp16 rounds to 0, where the square root has an infinite derivative"
    def data(n):
        x,y = classes(n)
        return 1e-4*x,y
    return learner(seed, data, lambda: nn.Sequential(nn.Linear(16, 32, bias=False), Magnitude(), Scale(1e4), nn.Linear(16, 4)))

zoo = dict(regnety=Scenario(regnety, 8, 5e-3), norm_free=Scenario(norm_free, 5, 1e-3), masked_add=Scenario(masked_add, 8, 1e-2),
           masked_fill=Scenario(masked_fill, 8, 1e-2), large_logits=Scenario(large_logits, 8, 3e-2), rms=Scenario(rms, 5, 1e-2),
           rms_inline=Scenario(rms_inline, 5, 1e-2), sum_pool=Scenario(sum_pool, 4, 3e-2), poisson=Scenario(poisson, 12, 1e-2),
           cosine=Scenario(cosine, 5, 1e-2), sigmoid_bce=Scenario(sigmoid_bce, 15, 1e-2), large_units=Scenario(large_units, 12, 1e-2),
           tiny_loss=Scenario(tiny_loss, 30, 1e-2), broken_pixels=Scenario(broken_pixels, 8, 1e-2),
           backward_only=Scenario(backward_only, 5, 1e-2))

# %% trainings that fail in fp32, too
def mlp(): return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

def diverges(seed): return learner(seed, curve, mlp, F.mse_loss, r2, opt_func=SGD)

bad_samples = 37,205,444 # in the training data

def nan_samples(seed):
    def data(n):
        x,y = curve(n)
        x[list(bad_samples),3] = math.nan
        return x,y
    return learner(seed, data, mlp, F.mse_loss, r2)

hopeless = dict(diverges=Scenario(diverges, 2, 10.), nan_samples=Scenario(nan_samples, 2, 1e-2))

# %% trainings
def fit(learn, epochs, lr):
    "Fits, and returns the final metric"
    with learn.no_bar(), learn.no_logging(): learn.fit(epochs, lr)
    return float(learn.recorder.values[-1][-1])

def plain_fp16(learn, epochs, lr, scale='dynamic'):
    "How PyTorch's usual fp16 loop ends, in words, and the final metric; a number as `scale` is static, and nothing checks for overflow"
    model,opt,half = learn.model,learn.opt_func(list(learn.model.parameters()), lr=lr),partial(torch.autocast, 'cpu', dtype=torch.float16)
    scaler = torch.amp.GradScaler('cpu', enabled=scale=='dynamic')
    factor,steps,skipped = (1 if scaler.is_enabled() else scale),0,0
    try:
        for _ in range(epochs):
            for x,y in learn.dls.train:
                with half(): pred = model(x)
                scaler.scale(factor*learn.loss_func(pred.float(), y)).backward()
                for p in model.parameters():
                    if p.grad is not None: p.grad /= factor
                before = scaler.get_scale()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
                steps,skipped = steps+1,skipped+(scaler.get_scale()<before or before==0)
                if not all(p.isfinite().all() for p in model.parameters()): return f'weights not finite after {steps} steps',math.nan
        model.eval()
        x,y = next(iter(learn.dls.valid))
        with torch.no_grad(), half(): pred = model(x)
    except RuntimeError as e: return f'raises {e}',math.nan
    figure = float(learn.metrics[0].func(pred.float(), y))
    return f'{skipped/steps:.0%} of {steps} steps skipped, scale {factor*scaler.get_scale():g}',figure
