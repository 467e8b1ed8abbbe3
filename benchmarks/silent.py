"""Small trainings that half precision makes wrong without an infinity in sight, and healthy ones whose rounding does no harm

`wrong` learns in fp32, and ends clearly worse in half precision, since numbers are rounded. In `healthy`, half precision is as good as
fp32, or fp32 itself is as far off once its layers are rounded, so that nothing is to be promoted and nothing to be said."""
import json,math,sys,time,warnings
from collections import namedtuple
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import fastai,torch
import torch.nn.functional as F
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import SGD,Callback,Learner,default_device,nn # noqa: F401
    from fastai_amp16.all import AdamW16
    from fastai_amp16.precision import PrecisionPlan,is_norm
from fastais import fastais
from hostile import classes,curve,learner,r2
from machine import machine

Program = namedtuple('Program', 'what make epochs lr end', defaults=('fit',)) # all metrics are at most 1: accuracy or R² at the end
classify,regress = partial(learner, n=480),partial(learner, n=480, loss_func=F.mse_loss, metric=r2)

def mlp(ni, no, nh=32): return nn.Sequential(nn.Linear(ni, nh), nn.ReLU(), nn.Linear(nh, no))
def shifted(data, by, std=1.):
    "`data`, whose inputs have the standard deviation `std` and stand at about `by`"
    def f(n):
        x,y = data(n)
        return by+std*x,y
    return f
def targets(f, data=curve):
    "`data` with other targets: `f(inputs, targets)`"
    def g(n):
        x,y = data(n)
        return x,f(x, y)
    return g
def in_order(learn):
    "The same learner, whose training data comes in the order of time"
    learn.dls.train.shuffle = False
    return learn

# %% angles
class Angles(nn.Module):
    "Sines and cosines of positions times frequencies: a product that autocast computes in half precision"
    def __init__(self, *freqs):
        super().__init__()
        self.register_buffer('freqs', torch.tensor([freqs]))
    def forward(self, t):
        angle = t[...,None]@self.freqs
        return torch.cat([angle.sin(), angle.cos()], -1).flatten(2)

class Located(nn.Module):
    "A small transformer that sees nothing but positions"
    def __init__(self, *freqs, d=16):
        super().__init__()
        self.angles,self.emb = Angles(*freqs),nn.Linear(2*len(freqs), d)
        self.qkv,self.head = nn.Linear(d, 3*d),nn.Linear(d, 1)
    def forward(self, t):
        h = self.emb(self.angles(t))
        h = h+F.scaled_dot_product_attention(*self.qkv(h).chunk(3, -1))
        return self.head(h[:,-1])

def places(n, first=3000, size=1000):
    t = torch.randint(first, first+size, (n, 1))+torch.arange(6.)
    return t,t[:,-1:].sin()+(0.3*t[:,-1:]).cos()

def years(n):
    "Decimal years, such as 2024.37, and what has a season"
    x = 2000+24*torch.rand(n, 1)
    return x,(2*math.pi*x).sin()+0.5*(4*math.pi*x).cos()

def series(n):
    "Ids that count from 1900 on, in the order of time"
    t = 1900.+torch.arange(n)[:,None]
    return t,(math.pi/2*t).sin()+(math.pi*t).cos()

class Periodic(nn.Module):
    def __init__(self, *freqs):
        super().__init__()
        self.angles,self.head = Angles(*freqs),nn.Linear(2*len(freqs), 1)
    def forward(self, t): return self.head(self.angles(t[...,None]).flatten(1))

class Fourier(nn.Module):
    "Fourier features of points of the plane, with frequencies of hundreds"
    def __init__(self):
        super().__init__()
        self.register_buffer('b', torch.tensor([[300.,-500.,700.,400.],[600.,400.,300.,-700.]]))
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        angle = 2*math.pi*x@self.b
        return self.head(torch.cat([angle.sin(), angle.cos()], 1))

def texture(n):
    x = torch.rand(n, 2)
    return x,(2*math.pi*(300*x[:,:1]+600*x[:,1:])).sin()+(2*math.pi*(400*x[:,:1]-700*x[:,1:])).cos()

class Interference(nn.Module):
    "The phase of a wave, after a path of three legs of about 300 wavelengths"
    def __init__(self):
        super().__init__()
        self.path,self.head = nn.Linear(3, 1, bias=False),nn.Linear(2, 1)
        self.path.weight.requires_grad_(False).fill_(1.)
    def forward(self, x):
        phase = 2*math.pi*self.path(x)
        return self.head(torch.cat([phase.sin(), phase.cos()], 1))

def paths(n):
    x = 300+10*torch.rand(n, 3)
    return x,(2*math.pi*x.sum(1, keepdim=True)+0.5).cos()

class Elapsed(nn.Module):
    "The time between events, from their timestamps"
    def __init__(self, k=5):
        super().__init__()
        self.register_buffer('diff', torch.eye(k+1, k).roll(1, 0)-torch.eye(k+1, k))
        self.body = mlp(k, 1)
    def forward(self, t): return self.body(t@self.diff)

def events(n):
    gaps = torch.rand(n, 5)
    return 5000+torch.cat([torch.zeros(n, 1), gaps.cumsum(1)], 1),gaps[:,:2].sum(1, keepdim=True)-gaps[:,3:4]

# %% differences of large numbers
def filters(d):
    "A layer that is not trained, such as a filter bank; it hardly mixes its inputs"
    l = nn.Linear(d, d, bias=False).requires_grad_(False)
    l.weight.mul_(0.1).add_(torch.eye(d))
    return l

class Centered(nn.Module):
    def __init__(self, d=16, c=4):
        super().__init__()
        self.inp,self.body = filters(d),mlp(d, c)
    def forward(self, x):
        h = self.inp(x)
        return self.body(h-h.mean(1, keepdim=True))

class Spread(nn.Module):
    "Learns from the variances of channels, as E[x²]-E[x]²"
    def __init__(self, d=4):
        super().__init__()
        self.inp,self.body = filters(d),mlp(d, 1)
    def forward(self, x):
        h = self.inp(x)
        return self.body((h*h).mean(1)-h.mean(1)**2)

def volatile(n):
    std = 0.5+torch.rand(n, 4)
    return 80+std[:,None]*torch.randn(n, 256, 4),std[:,:1]**2-std[:,1:2]**2

class Running(nn.Module):
    "A batch norm of one's own, which computes well with a batch, and notes squares in half precision for later"
    def __init__(self, d=16):
        super().__init__()
        self.inp = filters(d)
        self.register_buffer('mean', torch.zeros(d))
        self.register_buffer('square', torch.ones(d))
    def forward(self, x):
        h = self.inp(x)
        if self.training:
            with torch.no_grad(): self.mean,self.square = [a.lerp(b.float(), 0.5) for a,b in ((self.mean,h.mean(0)), (self.square,(h*h).mean(0)))]
            return (h-h.mean(0))/h.std(0)
        return (h-self.mean)*(self.square-self.mean**2).clamp(1e-4).rsqrt()

class Clock(nn.Module):
    "What alternates from batch to batch, by a count of batches that starts where an earlier fit has ended"
    def __init__(self, start=3000):
        super().__init__()
        self.body = mlp(8, 1)
        self.register_buffer('count', torch.tensor([[float(start)]]))
    def forward(self, x):
        sign = (self.count@self.count.new_tensor([[math.pi]])).cos()
        if self.training: self.count = self.count+1
        return sign*self.body(x)

def alternating(n, bs=32):
    x,y = curve(n)
    i = torch.arange(n)[:,None]//bs
    return x,y*torch.where((i%2==0) | (i>=512//bs), 1., -1.)

class Prototypes(nn.Module):
    "Classes by the distance to prototypes, |a|²+|b|²-2ab"
    def __init__(self, d=16, c=4):
        super().__init__()
        self.inp,self.proto = filters(d),nn.Parameter(20+torch.randn(c, d))
    def forward(self, x):
        a,b = self.inp(x),self.proto
        return 2*a@b.T-(a*a).sum(1, keepdim=True)-(b*b).sum(1)

class Similarity(nn.Module):
    "Cosines that are all near 1, by a temperature"
    def __init__(self, d=16, c=4, temp=5e-4):
        super().__init__()
        self.proto,self.temp = nn.Parameter(30+torch.randn(c, d)),temp
    def forward(self, x): return F.normalize(x, dim=1)@F.normalize(self.proto, dim=1).T/self.temp

class RMS(nn.Module):
    "A root mean square of one's own, whose squares are infinite: what is divided by an infinity is 0"
    def __init__(self, d, gain=1.):
        super().__init__()
        self.inp,self.body = nn.Linear(d, d),mlp(d, 4)
        self.register_buffer('gain', torch.tensor(1.))
        self.grows = gain
    def forward(self, x):
        h = self.inp(x)*self.gain
        if self.training: self.gain = self.gain*self.grows
        return self.body(h*torch.rsqrt((h*h).mean(-1, keepdim=True)+1e-6))

def images(n):
    x,y = classes(n, (1,6,6))
    return 3000+x,y

def conv_net(): return nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.GroupNorm(8, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))

def with_outlier(n):
    x,y = classes(n)
    x[:,3] = 8000
    return x,y

# %% high levels
class Trend(nn.Module):
    "A forecast as the sum of a trend and of what deviates from it"
    def __init__(self, d=16):
        super().__init__()
        self.trend,self.rest = nn.Linear(d, 1, bias=False).requires_grad_(False),mlp(d, 1)
        self.trend.weight.fill_(1/d)
    def forward(self, x):
        level = self.trend(x)
        return level+self.rest(x-x.mean(1, keepdim=True)).to(level.dtype)

def forecasts(n, d=16, at=1500):
    x = torch.randn(n, d)
    x = at+0.3*(x-x.mean(1, keepdim=True))
    return x,at+(x[:,:2]-at).sum(1, keepdim=True)

class LevelNorm(nn.Module):
    "Takes a level away, and puts it back"
    def __init__(self, level):
        super().__init__()
        self.level = level
    def forward(self, x, back=False): return x+x.new_tensor(self.level) if back else x-self.level

class Denormed(nn.Module):
    def __init__(self, d=16, level=1500.):
        super().__init__()
        self.norm,self.body = LevelNorm(level),mlp(d, 1)
    def forward(self, x): return self.norm(self.body(self.norm(x)), back=True)

class Biased(nn.Module):
    def __init__(self, ni, no, level):
        super().__init__()
        self.body = mlp(ni, no)
        nn.init.constant_(self.body[2].bias, level)
    def forward(self, x): return self.body(x)

def prices(n):
    x,y = curve(n)
    return x,1500+0.3*y

# %% what goes wrong later
def curriculum(n):
    "Numbers that grow from 10 to 2000 in the order of time"
    x,y = classes(n, noise=0.5)
    return torch.linspace(1, 200, n).clamp(max=100)[:,None]*20+x,y

def later(n, n_valid=256):
    "Validation data at a higher level"
    x,y = classes(n, noise=0.5)
    x[-n_valid:] += 3000
    return x,y

class Steep(nn.Module):
    "Which of two numbers is larger; the derivative is 3e5 where half precision cannot tell them apart"
    def __init__(self, d=8, nh=32):
        super().__init__()
        self.a,self.b,self.head = nn.Linear(d, nh),nn.Linear(d, nh),nn.Linear(d+nh, 1)
    def forward(self, x): return self.head(torch.cat([x, ((self.a(x)-self.b(x))*3e5).tanh()], 1))

def trained(learn, epochs=2, lr=1e-2):
    "The same learner after a fit in fp32"
    with learn.no_bar(), learn.no_logging(): learn.fit(epochs, lr)
    return learn

P = Program
wrong = dict(
    positions=P('positions from 3000 on in a small transformer', partial(regress, data=places, model=partial(Located, 1., .3, .1)), 2, 1e-2),
    years=P('decimal years', partial(regress, data=years, model=partial(Periodic, 2*math.pi, 4*math.pi)), 2, 5e-2),
    fourier=P('Fourier features', partial(regress, data=texture, model=Fourier), 2, 5e-2),
    phases=P('the phase of a wave after 900 wavelengths', partial(regress, data=paths, model=Interference), 2, 5e-2),
    timestamps=P('time between events, from timestamps', partial(regress, data=events, model=Elapsed), 2, 2e-2),
    centering=P('`h-h.mean()` of numbers around 1500', partial(classify, data=shifted(classes, 1500, .3), model=Centered), 2, 2e-2),
    variance=P('a variance as E[x²]-E[x]²', partial(regress, data=volatile, model=Spread), 2, 1e-2),
    running=P("a batch norm of one's own that notes squares", partial(classify, data=shifted(classes, 80.),
              model=lambda: nn.Sequential(Running(), mlp(16, 4))), 2, 1e-2),
    counter=P('what alternates with a count of batches', lambda s: in_order(regress(s, alternating, Clock, n=512)), 2, 2e-2),
    distances=P('distances by |a|²+|b|²-2ab', partial(classify, data=shifted(classes, 20, .5), model=Prototypes), 2, 2e-2),
    temperature=P('cosines by a temperature of 5e-4', partial(classify, data=shifted(classes, 30), model=Similarity), 2, 3e-2),
    images=P('raw images around 3000', partial(classify, data=images, model=conv_net), 2, 1e-2),
    outlier=P('a feature of 8000 beside those of 1', partial(classify, data=with_outlier,
              model=lambda: nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32, track_running_stats=False), nn.ReLU(), nn.Linear(32, 4))), 2, 1e-2),
    rms=P('a root mean square that divides by an infinity', partial(classify, data=shifted(classes, 0, 1000.), model=partial(RMS, 16)), 2, 1e-2),
    forecast=P('a forecast as trend and rest', partial(regress, data=forecasts, model=Trend), 2, 2e-2),
    level_norm=P('a module called `LevelNorm` that puts a level back', partial(regress, data=forecasts, model=Denormed), 2, 1e-2),
    bias=P('a bias at the level of the targets', partial(regress, data=prices, model=partial(Biased, 8, 1, 1500.)), 2, 2e-2),
    logits=P('logits that all stand at 4000', partial(classify, data=classes, model=partial(Biased, 16, 4, 4000.)), 2, 1e-2),
    ids=P('ids that grow beyond 2048', lambda s: in_order(regress(s, series, partial(Periodic, math.pi/2, math.pi))), 2, 5e-2),
    curriculum=P('a curriculum of growing numbers', lambda s: in_order(classify(s, curriculum, Centered)), 2, 2e-2),
    gain=P('a gain that grows, before a root mean square', partial(classify, data=classes, model=partial(RMS, 16, 1.3)), 2, 1e-2),
    later=P('larger numbers in the validation set', partial(classify, data=later, model=Centered), 2, 2e-2),
    steep=P('gradients too large by a factor of 600', partial(regress, data=targets(lambda x,y: x[:,:3].sum(1, keepdim=True)), model=Steep, opt_func=SGD), 2, 3e-2),
    validate=P('`validate` after a fit in fp32', lambda s: trained(classify(s, shifted(classes, 1500, 500.), partial(RMS, 16))), 0, 0, 'validate'),
    get_preds=P('`get_preds` after a fit in fp32', lambda s: trained(regress(s, places, partial(Located, 1., .3, .1))), 0, 0, 'get_preds'))

# %% healthy programs
class Own(nn.Module):
    "A module with `parts`, whose forward pass is `f(self, x)`"
    def __init__(self, f, **parts):
        super().__init__()
        self.f = f
        for k,v in parts.items(): setattr(self, k, v)
    def forward(self, x): return self.f(self, x)

def deep(d, depth, act, gain, no=1):
    layers = [nn.Linear(d, d) for _ in range(depth)]
    for l in layers: nn.init.normal_(l.weight, std=gain/d**0.5)
    return nn.Sequential(nn.Linear(8, d), *[m for l in layers for m in (l,act())], nn.Linear(d, no))

def own(f, **parts):
    "A function that makes a model of `f` and of what the functions `parts` make"
    return lambda: Own(f, **{k: p() for k,p in parts.items()})
def net(*parts):
    "A function that makes a model of what functions make"
    return lambda: nn.Sequential(*[p() for p in parts])
def lin(*a, **kw): return lambda: nn.Linear(*a, **kw)

def logistic(m, x):
    h = m.inp(x).sigmoid()
    for _ in range(40): h = 3.99*h*(1-h)
    return m.head(h)
def straight_through(hard, soft): return soft+(hard-soft).detach()
def rounded(m, x):
    h = m.inp(x).relu()
    return m.head(straight_through((4*h).round()/4, h))
def hard_attention(m, x):
    p = m.score(x).softmax(1)
    return m.head(x*straight_through(F.one_hot(p.argmax(1), 16).to(p.dtype), p))
def top_k(m, x):
    h = m.inp(x).relu()
    return m.head(torch.where(h>=h.topk(8, 1).values[:,-1:], h, 0))
def recommend(m, x): return (m.user(x[:,0])*m.item(x[:,1])).sum(1, keepdim=True)
def tied(m, x): return F.linear(m.inp(x), m.inp.weight.t())
def ensemble(m, x): return torch.stack([l(x) for l in m.members]).mean(0)
def augmented(m, x): return m.body(x*(1+0.3*torch.randn_like(x[:,:1]))+0.3*torch.randn_like(x))
def sampled(m, x):
    mean,log_std = m.inp(x).chunk(2, 1)
    return m.head(mean+(log_std-1).exp()*torch.randn_like(mean))
def generated(m, x): return m.body(torch.cat([x, torch.randn_like(x)], 1)).tanh()
def rankings(n):
    x = torch.randint(20, (n, 2))
    u,v = torch.randn(2, 20, 4)
    return x,(u[x[:,0]]*v[x[:,1]]).sum(1, keepdim=True)
def exact():
    m = nn.Linear(8, 1)
    nn.init.ones_(m.weight)
    return m
def blobs(n): return torch.randn(n, 8),torch.randn(n, 8).sign()*0.5
def hinge(p, t): return (1-p*t).relu().mean()
def critic(p, t): return F.mse_loss(p.mean(0), t.mean(0))+F.mse_loss(p.std(0), t.std(0))

healthy = dict(
    untrained=P('an untrained deep ReLU network', partial(regress, data=curve, model=lambda: deep(32, 40, nn.ReLU, 2**0.5)), 1, 1e-6),
    logistic=P('a chaotic recurrence: the logistic map', partial(regress, data=curve, model=own(logistic, inp=lin(8, 16), head=lin(16, 1))), 1, 1e-3),
    tanh=P('a chaotic deep tanh network', partial(regress, data=curve, model=lambda: deep(32, 30, nn.Tanh, 3.)), 1, 1e-3),
    dropout=P('dropout', partial(classify, data=classes, model=net(lin(16, 64), nn.ReLU, nn.Dropout, lin(64, 4))), 2, 1e-2),
    augmentation=P('random augmentation in the model', partial(classify, data=classes, model=own(augmented, body=partial(mlp, 16, 4))), 2, 1e-2),
    sampling=P('a sample of a distribution, as in a VAE', partial(regress, data=curve, model=own(sampled, inp=lin(8, 32), head=lin(16, 1))), 2, 1e-2),
    small=P('outputs near 0', partial(regress, data=targets(lambda x,y: 1e-4*y), model=partial(mlp, 8, 1)), 2, 1e-3),
    argmax=P('outputs of an argmax', partial(regress, data=targets(lambda x,y: x[:,:4].argmax(1, keepdim=True).float()),
             model=own(lambda m,x: straight_through((p := m.body(x).softmax(1)).argmax(1, keepdim=True).float(), p@m.k),
                       body=partial(mlp, 8, 4), k=lambda: nn.Parameter(torch.arange(4.)[:,None], False))), 2, 1e-2),
    rounded=P('a quantised layer', partial(regress, data=curve, model=own(rounded, inp=lin(8, 32), head=lin(32, 1))), 2, 1e-2),
    quantised=P('rounded outputs', partial(regress, data=curve, model=own(lambda m,x: straight_through((p := m.body(x)).round(), p),
                body=partial(mlp, 8, 1))), 2, 1e-2),
    batches_of_2=P('batch norm with batches of 2', partial(classify, data=classes, n=60, bs=2,
                   model=net(lin(16, 16), partial(nn.BatchNorm1d, 16), nn.ReLU, lin(16, 4))), 1, 1e-3),
    generator=P('a generator, and moments as its critic', partial(regress, data=blobs, model=own(generated, body=partial(mlp, 16, 8)),
                loss_func=critic), 2, 1e-2),
    fitted=P('a regression that is almost perfect', partial(regress, data=targets(lambda x,y: x.sum(1, keepdim=True)+1e-4*y), model=exact), 1, 1e-5),
    hard_attention=P('hard attention', partial(classify, data=classes, model=own(hard_attention, score=lin(16, 16), head=lin(16, 4))), 2, 1e-2),
    sparse=P('sparse targets', partial(regress, data=targets(lambda x,y: y*(x[:,:1]>2)), model=partial(mlp, 8, 1)), 2, 1e-2),
    hinge=P('a hinge loss at 0', partial(regress, data=targets(lambda x,y: x[:,:1].sign()), loss_func=hinge,
            model=own(lambda m,x: m.body(x)+1e3*x[:,:1].sign(), body=partial(mlp, 8, 1))), 1, 1e-3),
    saturated=P('a saturated classifier', partial(classify, data=partial(classes, noise=0.1), model=own(lambda m,x: 30*m.body(x), body=partial(mlp, 16, 4))), 2, 1e-2),
    scales=P('outputs on different scales', partial(regress, data=targets(lambda x,y: y*torch.tensor([1.,1e-3,100.])), loss_func=lambda p,t:
             F.mse_loss(p/p.new_tensor([1.,1e-3,100.]), t/t.new_tensor([1.,1e-3,100.])),
             model=own(lambda m,x: m.body(x)*x.new_tensor([1.,1e-3,100.]), body=partial(mlp, 8, 3))), 2, 1e-2),
    dot=P('the dot product of embeddings', partial(regress, data=rankings, model=own(recommend, user=partial(nn.Embedding, 20, 4),
          item=partial(nn.Embedding, 20, 4))), 2, 5e-2),
    tied=P('tied weights', partial(regress, data=lambda n: ((x := torch.randn(n, 4)@torch.randn(4, 16)),x), model=own(tied, inp=lin(16, 8))), 2, 1e-2),
    gru=P('a GRU', partial(regress, data=lambda n: ((x := torch.randn(n, 8, 4)),x[:,:,:1].mean(1)), model=own(lambda m,x: m.head(m.rnn(x)[0][:,-1]),
          rnn=partial(nn.GRU, 4, 16, batch_first=True), head=lin(16, 1))), 2, 2e-2),
    ensemble=P('the mean of an ensemble', partial(regress, data=curve, model=lambda: Own(ensemble, members=nn.ModuleList([mlp(8, 1) for _ in range(5)]))), 2, 1e-2),
    top_k=P('the largest 8 of 64', partial(classify, data=classes, model=own(top_k, inp=lin(16, 64), head=lin(64, 4))), 2, 1e-2),
    constant=P('a network that outputs constants', partial(regress, data=curve, model=own(lambda m,x: 0*m.body(x)+m.b, body=partial(mlp, 8, 1),
               b=lambda: nn.Parameter(torch.ones(1)))), 1, 1e-2),
    lr_0=P('a learning rate of 0', partial(regress, data=curve, model=partial(mlp, 8, 1)), 1, 0.),
    conv_net=P('a convolutional network', partial(classify, data=lambda n: classes(n, (1,6,6)), model=conv_net), 2, 1e-2))

# %% the table
contenders = dict(fp32='to_fp32', fastai_fp16='to_fp16', fastai_bf16='to_bf16', fp16='to_fp16_dynamic', bf16='to_bf16_dynamic')
autocasts = dict(to_fp16=torch.float16, to_bf16=torch.bfloat16)

class Skips(Callback):
    "Counts the steps that were skipped"
    n = 0
    def after_cancel_step(self): self.n += 1

def ends(learn, p):
    "The final accuracy or R²"
    if p.end=='fit':
        learn.fit(p.epochs, p.lr)
        return float(learn.recorder.values[-1][-1])
    if p.end=='validate': return float(learn.validate()[-1])
    return float(learn.metrics[0].func(*learn.get_preds()))

def in_half(learn):
    "The number of modules with weights that compute in half precision, and of all of them besides norms"
    plan = PrecisionPlan(learn.model, torch.float16, learn.mixed_precision.keeps(learn.model))
    those = [m for m in learn.model.modules() if any(True for _ in m.parameters(recurse=False)) and not is_norm(m)]
    return sum(m not in plan.in_fp32 for m in those),len(those)

def train(p, to, seed=0):
    "How the program `p` ends with the learner's method `to`, and what this took"
    learn,calls,skips = p.make(seed),[],Skips()
    learn.model.register_forward_pre_hook(lambda *_: calls.append(1))
    alone = p.end!='fit' and to in autocasts # fastai's own callback is for fits
    getattr(learn, 'to_fp32' if alone else to)(**(dict(init_scale=16.) if to=='to_fp16' and not alone else {})).add_cb(skips)
    batches = p.epochs*(len(learn.dls.train)+1) or 1
    with warnings.catch_warnings(record=True) as told, fastais(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        with torch.autocast(default_device().type, autocasts[to]) if alone else nullcontext(): res = dict(score=ends(learn, p))
    res.update(skipped=skips.n, passes=len(calls)/batches)
    if not to.endswith('_dynamic'): return res
    mp = learn.mixed_precision
    half,n = in_half(learn)
    told = [str(w.message) for w in told if type(w.message).__module__.startswith('fastai_amp16') or 'fp16' in str(w.message) or 'half' in str(w.message)]
    return {**res, 'promoted':[str(o) for o in mp.promoted], 'half':half, 'modules':n, 'told':told}

def row(kind, name, p):
    start = time.perf_counter()
    res = dict(kind=kind, name=name, what=p.what)
    for k,to in contenders.items():
        try: res[k] = train(p, to)
        except Exception as e: res[k] = dict(score=math.nan, error=f'{type(e).__name__}: {e}')
    return {**res, 'seconds':time.perf_counter()-start}

def show(r):
    print(f"{r['name']:15}", *(f"{r[k]['score']:9.3f}" for k in contenders), f"{r['seconds']:5.1f}s", f"skipped {r['fastai_fp16'].get('skipped')}",
          *(f"| {r[k]['half']}/{r[k]['modules']} half, {r[k]['passes']:.2f} passes, told {len(r[k]['told'])} {r[k]['promoted']}" if 'half' in r[k]
            else '| '+r[k]['error'][:80] for k in ('fp16','bf16')), flush=True)

def main(*names):
    print(f"{'':15}", *(f'{k:>11}'[-9:] for k in contenders))
    rows = []
    for kind,zoo in dict(wrong=wrong, healthy=healthy).items():
        for name,p in zoo.items():
            if names and name not in names: continue
            rows.append(row(kind, name, p))
            show(rows[-1])
    if not names: (Path(__file__).parent/'silent.json').write_text(json.dumps(dict(machine=machine(), fastai=fastai.__version__, rows=rows), indent=1)+'\n')

if __name__=='__main__': main(*sys.argv[1:])
