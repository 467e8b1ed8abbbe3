"""Families of small programs with random parameters: some that half precision makes wrong though all numbers are finite, and healthy ones

Each function draws a program. Level, frequency, scale, width, depth, activation, norm, batch size, optimizer, learning rate, loss and
the moment when a fault begins are random. Where half precision is at fault, `at` names the part, as in `keep_fp32`."""
import math,random,warnings
from functools import partial
import torch
import torch.nn.functional as F
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Adam,DataLoader,DataLoaders,Learner,OptimWrapper,RMSProp,SGD,default_device,nn,set_seed
    from fastai_amp16.all import AdamW16

class Draw(random.Random):
    "Random parameters"
    def log(self, a, b): return math.exp(self.uniform(math.log(a), math.log(b)))
    def whole(self, a, b): return round(self.log(a, b))
    def chance(self, p): return self.random()<p

class Own(nn.Module):
    "A module with `parts`, modules, weights and buffers, whose forward pass is `fwd(self, *args)`"
    def __init__(self, fwd, **parts):
        super().__init__()
        self.fwd = fwd
        for k,v in parts.items(): self.register_buffer(k, v.clone()) if type(v) is torch.Tensor else setattr(self, k, v)
    def forward(self, *args): return self.fwd(self, *args)

# %% what the families have in common
n_samples = 480 # two thirds are for training
acts = nn.ReLU,nn.GELU,nn.Tanh,nn.SiLU
losses = dict(mse=lambda d: F.mse_loss, l1=lambda d: F.l1_loss, huber=lambda d: partial(F.smooth_l1_loss, beta=d.log(.1, 1)),
              pinball=lambda d: pinball(d.uniform(.2, .8)))
opts = dict(adamw16=(AdamW16,1.), adam=(Adam,1.), adamw=(partial(OptimWrapper, opt=torch.optim.AdamW),1.), rmsprop=(RMSProp,.3),
            sgd=(partial(SGD, mom=.9),2.)) # each with what it makes of a learning rate for Adam
def pinball(q): return lambda p,t: torch.maximum(q*(t-p), (q-1)*(t-p)).mean()

class Program:
    "Draws what is left open: `model` and `data` are functions without arguments, `at` names what is at fault"
    def __init__(self, d, model, data, at=None, loss=None, lr=1., steps=(40,100), opt=None, bs=None, in_order=False, ends=True):
        self.model,self.data,self.at,self.in_order = model,data,at,in_order
        self.loss_name = 'own' if loss else d.choice([*losses])
        self.loss = loss or losses[self.loss_name](d)
        self.opt_name = opt or d.choice([*opts])
        self.opt,by = opts[self.opt_name]
        self.lr,self.bs = lr*by*d.log(3e-3, 2e-2),bs or d.choice([16,32,64])
        self.seed = d.randint(0, 10**6)
        self.epochs = max(1, round(d.log(*steps)*self.bs/(n_samples*2//3)))
        self.end = d.choice(['fit']*8+['validate','get_preds']) if ends else 'fit' # the last two after a fit in fp32

    def learner(self):
        set_seed(self.seed, reproducible=True)
        ts = self.data()
        n = len(ts[0])*2//3
        def loader(samples, **kwargs):
            def batch(i): return tuple(t[samples][i] for t in ts)
            return DataLoader(range(len(ts[0][samples])), create_batch=batch, **kwargs)
        train = loader(slice(n), bs=self.bs, shuffle=not self.in_order, drop_last=True)
        dls = DataLoaders(train, loader(slice(n, None), bs=n_samples), device=default_device())
        dls.n_inp = len(ts)-1
        return Learner(dls, self.model().to(default_device()), self.loss, self.opt, lr=self.lr)

def body(d, ni, no, norms=(None,None,'layer','batch')):
    "A function that makes a small network"
    w,depth,act,norm = d.choice([16,24,32,48]),d.choice([1,1,2,3]),d.choice(acts),d.choice(norms)
    def layers():
        for i in range(depth):
            yield nn.Linear(w if i else ni, w)
            if norm: yield nn.LayerNorm(w) if norm=='layer' else nn.BatchNorm1d(w)
            yield act()
        yield nn.Linear(w, no)
    return lambda: nn.Sequential(*layers())

def lin(ni, no, weight=None, at=None, trained=True, **kwargs):
    "A linear layer, with this weight and all biases `at`"
    l = nn.Linear(ni, no, **kwargs)
    if weight is not None: l.weight.data.copy_(torch.as_tensor(weight))
    if at is not None: l.bias.data.fill_(at)
    return l.requires_grad_(trained)
def same(n, by=.3): return torch.eye(n)+by*torch.eye(n).roll(1, 0)
def passes(n, by=0.):
    "A layer that is not trained: it gives what it takes in, and `by` times its neighbor"
    return lin(n, n, same(n, by), trained=False, bias=False)

def scaled(y): return (y-y.mean(0))/y.std(0)
def target(d, x, no=1, bent=.5):
    "What can be learned of `x`: a linear function and a bent one, and sometimes noise"
    x = x.flatten(1)
    a,b = torch.randn(2, x.shape[1], no)/x.shape[1]**.5
    return scaled(x@a+bent*(x@b).abs())+d.choice([0.,0.,.03,.1])*torch.randn(len(x), no)
def labels(y, c): return torch.bucketize(y[:,0].contiguous(), y[:,0].quantile(torch.linspace(0, 1, c+1)[1:-1]))
def learned(d, c, data):
    "`data` with targets, or with `c` classes of them"
    def f():
        *xs,y = data()
        return *xs,(labels(y, c) if c else y)
    return f
def ce(c): return F.cross_entropy if c else None

def plain(d, ni, no=1, c=0):
    "Normally distributed inputs, and what can be learned of them"
    def data():
        x = torch.randn(n_samples, ni)
        return x,target(d, x, no)
    return learned(d, c, data)

# %% wrong: periodic features of large arguments
def waves(a): return torch.cat([a.sin(), a.cos()], -1)
def of_waves(a): return scaled(waves(a)@torch.randn(2*a.shape[1], 1))
def product(freqs): return Own(lambda m,t: t@m.freqs, freqs=freqs)

def given_angles(d):
    "Waves of a product with given frequencies"
    ni,n,at,span,c = d.randint(1, 3),d.randint(2, 6),d.log(200, 5000),d.log(1, 20),d.choice([0,0,3])
    freqs,net = torch.randn(ni, n)*2*math.pi/span,body(d, 2*n, c or 1)
    def data():
        t = at+span*torch.rand(n_samples, ni)
        return t,of_waves(t@freqs)
    return Program(d, lambda: Own(lambda m,t: m.body(waves(m.angles(t))), angles=product(freqs), body=net()), learned(d, c, data), 'angles',
                   ce(c))

def learned_angles(d):
    n,w,at = d.randint(4, 24),d.log(3, 200),d.log(1e3, 2e4)
    def model():
        angles = lin(1, n, w*torch.linspace(.9, 1.1, n)[:,None], at)
        return Own(lambda m,t: m.out(torch.sin(m.angles(t))), angles=angles, out=nn.Linear(n, 1))
    def data():
        t = 2*torch.rand(n_samples, 1)
        return t,1.4*torch.sin(w*t+at)
    return Program(d, model, data, 'angles', lr=.15, steps=(70,120))

def random_fourier(d):
    "A frozen layer of random Fourier features"
    ni,n,c,scale = d.randint(1, 4),d.choice([16,32,64]),d.choice([0,3]),d.log(100, 1e4)
    def fourier():
        l = lin(ni, n, torch.randn(n, ni)*scale, trained=False)
        l.bias.data.uniform_(0, 2*math.pi)
        return l
    seen = fourier()
    def data():
        x = torch.rand(n_samples, ni)
        return x,scaled(torch.cos(seen(x))@torch.randn(n, 1))
    def model():
        m = Own(lambda m,x: m.head(torch.cos(m.fourier(x))), fourier=fourier(), head=nn.Linear(n, c or 1))
        m.fourier.load_state_dict(seen.state_dict())
        return m
    return Program(d, model, learned(d, c, data), 'fourier', ce(c))

def time_stamps(d):
    "Decimal years, days or seconds, as waves of a year, a week or a day"
    at,period = d.choice([(2000,1.),(700,7/3),(5e4,50.)])
    n = d.randint(1, 3)
    freqs,net = 2*math.pi/period*torch.arange(1., n+1)[None],body(d, 2*n, 1)
    def data():
        t = at+10*period*torch.rand(n_samples, 1)
        return t,of_waves(t@freqs)
    return Program(d, lambda: Own(lambda m,t: m.body(waves(m.angles(t))), angles=product(freqs), body=net()), data, 'angles')

def turned(x, a):
    x,y = x.chunk(2, -1)
    return torch.cat([x*a.cos()-y*a.sin(), x*a.sin()+y*a.cos()], -1)
def rotary(d):
    "Features that are turned by a product of positions and frequencies"
    at,ni,k = d.whole(1000, 9000),d.randint(4, 8),d.randint(2, 4)
    freqs,net = torch.tensor([[d.log(.3, 1.5) for _ in range(k)]]),body(d, 2*k, 1)
    emb = torch.randn(ni, 2*k)/ni**.5
    def data():
        x,t = torch.randn(n_samples, ni),torch.randint(at, 2*at, (n_samples, 1)).float()
        return x,t,scaled(turned(x@emb, t@freqs)@torch.randn(2*k, 1))
    def forward(m, x, t): return m.body(turned(m.emb(x), m.angles(t)))
    return Program(d, lambda: Own(forward, emb=lin(ni, 2*k, emb.T, 0.), angles=product(freqs), body=net()), data, 'angles')

def ids(d):
    "Ids as numbers, of which the last digits count"
    at,k = d.whole(2e3, 2e4),d.randint(2, 5)
    freqs,net = 2*math.pi/k*torch.arange(1., 3)[None],body(d, 4, 1)
    def data():
        t = torch.randint(at, at+999, (n_samples, 1)).float()
        return t,of_waves(t@freqs)
    return Program(d, lambda: Own(lambda m,t: m.body(waves(m.digits(t))), digits=product(freqs), body=net()), data, 'digits')

# %% wrong: differences of large numbers
def differences(h): return h-h.mean(1, keepdim=True)
centered = [differences, lambda h: h-h[:,:1], lambda h: h.diff(dim=1, prepend=h[:,:1]),
            lambda h: F.layer_norm(h, h.shape[1:]), lambda h: differences(h)/(differences(h).square().mean(1, keepdim=True)+1e-3).sqrt()]

def around(d, ni, level, std, c=0):
    "Inputs around a level, of which the differences count"
    def data():
        z = torch.randn(n_samples, ni)
        return level+std*z,target(d, differences(z))
    return learned(d, c, data)
def level_and_std(d, least=2e3, most=2e4):
    level = d.log(300, 2e4)
    return level,max(.03, level/d.log(least, most))

def centering(d):
    ni,c,by = d.randint(4, 16),d.choice([0,0,3]),d.choice(centered)
    net,(level,std),trained = body(d, ni, c or 1),level_and_std(d),d.chance(.3)
    def forward(m, x): return m.body(by(m.inp(x))/std)
    def model(): return Own(forward, inp=lin(ni, ni, same(ni), trained=trained, bias=False), body=net())
    return Program(d, model, around(d, ni, level, std, c), 'inp', ce(c))

def returns(d):
    "Differences of neighbors in time, by a product"
    ni,c,trained = d.randint(5, 16),d.choice([0,0,3]),d.chance(.3)
    diff,(level,std),net = torch.eye(ni-1, ni)-torch.eye(ni-1, ni).roll(1, 1),level_and_std(d),body(d, ni-1, c or 1)
    return Program(d, lambda: Own(lambda m,x: m.body(m.diff(x)/std), diff=lin(ni, ni-1, diff, trained=trained, bias=False), body=net()),
                   around(d, ni, level, std, c), 'diff', ce(c))

def variance(d):
    "E[x²]-E[x]²"
    ni,n,level = d.randint(2, 4),d.choice([64,128]),d.log(40, 150)
    net = body(d, ni, 1)
    def data():
        std = .5+torch.rand(n_samples, ni)
        return level+std[:,None]*torch.randn(n_samples, n, ni),scaled(std.square()@torch.randn(ni, 1))
    def spread(m, x):
        h = m.inp(x)
        return m.body((h*h).mean(1)-h.mean(1)**2)
    return Program(d, lambda: Own(spread, inp=passes(ni), body=net()), data, ['inp','.',['inp','.']])

def clusters(at, ni, c, std=.6):
    "Centers, and samples around them"
    protos = at+torch.randn(c, ni)
    def data():
        y = torch.randint(c, (n_samples,))
        return protos[y]+std*torch.randn(n_samples, ni),y
    return protos,data

def distances(d):
    "|a|²+|b|²-2ab"
    ni,c,level,by = d.randint(4, 16),d.randint(3, 6),d.log(20, 200),d.log(.1, 1)
    protos,data = clusters(level, ni, c)
    def forward(m, x):
        a,b = m.inp(x),m.proto
        return (2*a@b.T-(a*a).sum(1, keepdim=True)-(b*b).sum(1))*by
    def model():
        layers = nn.Sequential(nn.Linear(ni, 8), nn.ReLU(), nn.Linear(8, ni))
        for p in layers[-1].parameters(): nn.init.zeros_(p)
        return Own(forward, inp=Own(lambda m,x: x+m.layers(x-level), layers=layers), proto=nn.Parameter(protos+torch.randn(c, ni)))
    return Program(d, model, data, ['.',['inp','.']], F.cross_entropy)

def temperature(d):
    "Cosines, by a low temperature"
    ni,c,level = d.randint(4, 16),d.randint(3, 6),d.log(20, 150)
    protos,data = clusters(level, ni, c)
    t = 1/level**2*d.log(.5, 3)
    def forward(m, x): return F.normalize(m.inp(x), dim=1)@F.normalize(m.proto, dim=1).T/t
    def model(): return Own(forward, inp=passes(ni), proto=nn.Parameter(protos+.5*torch.randn(c, ni)))
    return Program(d, model, data, ['.','inp',['inp','.']], F.cross_entropy)

# %% wrong: levels of inputs, biases, targets, forecasts
def raw_inputs(d):
    "Raw measurements in front of a norm"
    ni,c,w = d.randint(4, 16),d.choice([0,3,4]),d.choice([16,32])
    (level,std),act = level_and_std(d),d.choice(acts)
    def model():
        norm = nn.BatchNorm1d(w, track_running_stats=False)
        return nn.Sequential(nn.Linear(ni, w, bias=False), norm, act(), nn.Linear(w, c or 1))
    def data():
        z = torch.randn(n_samples, ni)
        return level+std*z,target(d, z)
    return Program(d, model, learned(d, c, data), '0', ce(c))

def images(d):
    "Raw images in front of a convolution"
    c,w,(level,std) = d.choice([3,4]),d.choice([8,16]),level_and_std(d)
    norms = partial(nn.GroupNorm, w, w),partial(nn.InstanceNorm2d, w),partial(nn.BatchNorm2d, w, track_running_stats=False)
    norm,act = d.choice(norms),d.choice(acts)
    differs = d.choice([0.,.02])*level
    protos = torch.randn(c, 1, 6, 6)
    def data():
        y = torch.randint(c, (n_samples,))
        return level+differs*torch.randn(n_samples, 1, 1, 1)+std*(protos[y]+.8*torch.randn(n_samples, 1, 6, 6)),y
    def model():
        conv = nn.Conv2d(1, w, 3, bias=False)
        if differs: conv.weight.data -= conv.weight.data.mean((2,3), keepdim=True)
        return nn.Sequential(conv, norm(), act(), nn.Flatten(), nn.Linear(16*w, c))
    return Program(d, model, data, '0', F.cross_entropy)

def series(d, ni, no, level, std, step):
    def data():
        t = torch.arange(float(ni+no))[None]+6*torch.rand(n_samples, 1)
        s = level*(1+.05*torch.randn(n_samples, 1))+std*(t*step).sin()
        return s[:,:ni],s[:,ni:]
    return data

def forecast(d):
    "A forecast that adds a level back, which goes through a layer"
    ni,no,level,std,trained = d.choice([8,16]),d.randint(1, 4),d.log(200, 2e4),d.log(.3, 2.),d.chance(.4)
    net,kind = body(d, ni, no, (None,)),d.choice(['last','mean'])
    def forward(m, x):
        at = m.level(x[:,-1:] if kind=='last' else x.mean(1, keepdim=True))
        return at+m.f(x-x[:,-1:]).to(at.dtype)
    def model(): return Own(forward, level=lin(1, 1, [[1.]], 0., trained), f=net())
    return Program(d, model, series(d, ni, no, level, std, d.uniform(.3, 1.)), 'level', lr=.3 if trained else 1.)

class Around(nn.Module):
    "Takes a level away, and puts it back in the precision of what it gets"
    def __init__(self, level):
        super().__init__()
        self.level = level
    def forward(self, x, back=False): return x+x.new_tensor(self.level) if back else x-self.level
def denormalized(d):
    "A module that puts a level back in its own code"
    ni,no,level,std = d.choice([8,16]),d.randint(1, 4),d.log(1000, 2e4),d.log(.3, 2.)
    net = body(d, ni, no, (None,))
    def data():
        x,y = plain(d, ni, no)()
        return level+x,level+std*y
    return Program(d, lambda: Own(lambda m,x: m.rev(m.body(m.rev(x)), True), rev=Around(level), body=net()), data, 'rev')

def bias_at_level(d):
    "Targets around a level, which a bias holds"
    ni,level = d.randint(4, 12),d.log(200, 2e4)
    std,net = max(d.log(.2, 1), level/5e4),body(d, ni, 1)
    def model():
        m = net()
        m[-1].bias.data.fill_(level)
        return m
    def data():
        x,y = plain(d, ni)()
        return x,level+std*y
    return Program(d, model, data, str(len(net())-1))

def logits_at_level(d):
    ni,c,at = d.randint(4, 16),d.randint(3, 6),d.log(3e3, 3e4)
    net = body(d, ni, c)
    def model():
        m = net()
        m[-1].bias.data.fill_(at)
        return m
    return Program(d, model, plain(d, ni, c=c), str(len(net())-1), F.cross_entropy, lr=2.)

# %% wrong: sizes that differ, squares and norms inside
def outlier(d):
    "A feature that is large beside small ones"
    ni,w,big,small = d.randint(4, 16),32,d.log(3e3, 6e4),d.log(.03, .3)
    def data():
        x = torch.randn(n_samples, ni)
        return torch.cat([small*x, torch.full_like(x[:,:1], big)], 1),target(d, x)
    def model():
        norm = nn.BatchNorm1d(w, track_running_stats=False)
        return nn.Sequential(nn.Linear(ni+1, w, bias=False), norm, nn.ReLU(), nn.Linear(w, 1))
    return Program(d, model, data, '0')

def root_mean_square(d, growth):
    "A root mean square of one's own whose squares overflow: what is divided by an infinity is 0"
    ni,w,gain,how,i = d.randint(4, 16),d.choice([16,32]),d.log(300, 5e4),d.choice(['mean','sum','norm']),d.randint(0, 1)
    if growth: gain = 1.
    def rms(m, x):
        h = x*m.gain
        if m.training: m.gain = m.gain*m.growth
        if how=='norm': return h/(h*h).sum(-1, keepdim=True).add(1e-6).sqrt()*w**.5
        s = (h*h).mean(-1, keepdim=True) if how=='mean' else (h*h).sum(-1, keepdim=True)/w
        return h*torch.rsqrt(s+1e-6)
    def model():
        layers = [nn.Linear(ni, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1)]
        layers.insert(1+2*i, Own(rms, gain=torch.tensor(gain), growth=torch.tensor(growth or 1.)))
        return nn.Sequential(*layers)
    return Program(d, model, plain(d, ni), f'{1+2*i}', ends=not growth)
def own_rms(d): return root_mean_square(d, 0)
def growing_gain(d): return root_mean_square(d, d.uniform(1.1, 1.3))

def small_head(d):
    "A dead layer in front of a head that begins near 0"
    ni,c,by = d.randint(8, 16),d.choice([2,3]),d.choice([0.,.01,.1])
    def unit(m, x): return x*(m.gain*x).square().mean(1, keepdim=True).add(1e-6).rsqrt()*m.gain
    gain = d.log(500, 3e4)
    def model():
        m = nn.Sequential(nn.Linear(ni, 32), nn.ReLU(), Own(unit, gain=torch.tensor(gain)), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, c))
        m[-1].weight.data.mul_(by)
        m[-1].bias.data.zero_()
        return m
    return Program(d, model, plain(d, ni, c=c), '2', F.cross_entropy)

# %% wrong: sums of many, state
def running_sum(d):
    "Sums over a long sequence by a product with ones, and their differences"
    n,k,level = d.choice([128,256]),d.choice([4,8]),d.log(5, 50)
    net,each = body(d, k-1, 1),n//k
    def data():
        x = level+torch.randn(n_samples, n)
        return x,target(d, x.view(n_samples, k, each)[:,1:].mean(2)*each**.5-level*each**.5)
    def forward(m, x): return m.body((m.sums(x)[:,each-1::each].diff(dim=1)-level*each)/each**.5)
    return Program(d, lambda: Own(forward, sums=product(torch.ones(n, n).triu()), body=net()), data, 'sums')

def counts(d):
    "A count of batches, in the precision of a layer, that switches on a part of the network"
    ni,at,after = d.randint(4, 12),d.choice([2048,4096]),d.randint(6, 20)
    net = body(d, ni, 1, (None,))
    def forward(m, x):
        h = m.skip(x)
        if m.training: m.count = (m.count+1).to(h.dtype)
        return h+m.body(x)*(m.count>at+after)
    def model(): return Own(forward, skip=nn.Linear(ni, 1), body=net(), count=torch.tensor(float(at)))
    return Program(d, model, plain(d, ni), ['.',['.','skip']], ends=False)

def moving_average(d):
    "A batch norm of one's own, with a moving average of squares"
    ni,level,std = d.randint(4, 12),d.log(60, 250),d.log(.5, 2)
    net = body(d, ni, 1, (None,))
    def forward(m, x):
        h = m.inp(x)
        if not m.training: return m.body((h-m.mean)*(m.square-m.mean**2).clamp(1e-4).rsqrt())
        with torch.no_grad(): m.mean,m.square = m.mean.lerp(h.mean(0).float(), .5),m.square.lerp((h*h).mean(0).float(), .5)
        return m.body((h-h.mean(0))/h.std(0))
    def data():
        x,y = plain(d, ni)()
        return level+std*x,y
    def model(): return Own(forward, inp=passes(ni, .3), body=net(), mean=torch.zeros(ni), square=torch.ones(ni))
    return Program(d, model, data, ['inp','.',['inp','.']], ends=False)

# %% wrong: boxes, tables
def iou_loss(p, t):
    (px,py,pw,ph),(tx,ty,tw,th) = p.unbind(1),t.unbind(1)
    w = (torch.minimum(px+pw, tx+tw)-torch.maximum(px, tx)).clamp(0)
    h = (torch.minimum(py+ph, ty+th)-torch.maximum(py, ty)).clamp(0)
    i = w*h
    return (1-i/(pw.abs()*ph.abs()+tw*th-i).clamp(1e-3)).mean()
def boxes(d):
    "Boxes in pixels, by IoU"
    ni,size,w = d.randint(6, 12),d.log(640, 4000),d.log(8, 40)
    net = body(d, ni, 4, (None,))
    def forward(m, at, x):
        o = m.f(x)
        return torch.cat([m.at(at)+.3*w*o[:,:2], w*(1+.3*o[:,2:].tanh())], 1)
    def data():
        x,at = torch.randn(n_samples, ni),size*torch.rand(n_samples, 2)
        return at,x,torch.cat([at+.3*w*x[:,:2], w*(1+.3*x[:,2:4].tanh())], 1)
    return Program(d, lambda: Own(forward, f=net(), at=lin(2, 2, torch.eye(2), trained=False, bias=False)), data, 'at', iou_loss)

def interpolation(d):
    "A table, read by linear interpolation at places that a product gives"
    n = d.choice([256,1024,4096])
    values = torch.randn(n+1, 1)
    def read(table, at):
        at = at.float().clamp(0, n-1e-3)
        i = at.long()[:,0]
        f = at-i[:,None]
        return (1-f)*table[i]+f*table[i+1]
    def data():
        x = torch.rand(n_samples, 1)
        return x,read(values, n*x)
    def model(): return Own(lambda m,x: read(m.table, m.places(x)), places=lin(1, 1, [[n]], trained=False, bias=False),
                            table=nn.Parameter(values+.1*torch.randn(n+1, 1)))
    return Program(d, model, data, 'places')

# %% wrong: later, or in gradients only
def later(d):
    "Numbers that grow during the training, or are larger in the validation set"
    ni,std,kind = d.randint(6, 16),d.log(.3, 1.),d.choice(['curriculum','validation'])
    net,top = body(d, ni, 1),std*d.log(2e3, 2e4)
    def data():
        z = torch.randn(n_samples, ni)
        if kind=='curriculum': level = top*torch.linspace(.01, 1.5, n_samples).clamp(max=1.)
        else: level = torch.where(torch.arange(n_samples)<n_samples*2//3, 0., top)
        return level[:,None]+std*z,target(d, differences(z))
    def model(): return Own(lambda m,x: m.body(differences(m.inp(x))/std), inp=passes(ni), body=net())
    return Program(d, model, data, 'inp', in_order=kind=='curriculum', ends=False)

def steep(d):
    "Gradients that are far too large, where half precision rounds an argument to 0"
    ni,by = d.randint(4, 12),d.log(1e4, 3e5)
    net = body(d, ni, 8, (None,))
    def forward(m, x): return m.head(torch.cat([m.a(x), .1*(m.b(x)*by).tanh()], 1))
    return Program(d, lambda: Own(forward, a=net(), b=nn.Linear(ni, 8), head=nn.Linear(16, 1)), plain(d, ni), 'b', ends=False)

wrong = [given_angles, learned_angles, random_fourier, time_stamps, rotary, ids, centering, returns, variance, distances, temperature,
         raw_inputs, images, forecast, denormalized, bias_at_level, logits_at_level, outlier, own_rms, growing_gain, small_head,
         running_sum, counts, moving_average, boxes, interpolation, later, steep]

# %% healthy
def healthily(d, ni, model, no=1, c=0, data=None, loss=None, steps=(30,90), **kwargs):
    "A program with ordinary data, unless other `data` is given"
    return Program(d, model, data or plain(d, ni, no, c), loss=loss or ce(c), steps=steps, **kwargs)

def ordinary(d):
    ni,c = d.randint(4, 16),d.choice([0,3,5])
    return healthily(d, ni, body(d, ni, c or 1), c=c)

def large(w, gain): return lin(w, w, torch.randn(w, w)*gain/w**.5)
def recurrence(d):
    "A chaotic recurrence"
    ni,w,n,kind = d.randint(4, 12),d.choice([16,32]),d.randint(8, 20),d.choice(['logistic','henon','tanh','rnn'])
    r,gain = d.uniform(3.7, 4.),d.uniform(2.5, 5.)
    def forward(m, x):
        h = m.inp(x).sigmoid()
        if kind=='rnn': return m.head(m.w(x[:,None].expand(-1, n, -1))[0][:,-1])
        if kind=='henon':
            a,b = h.chunk(2, 1)
            for _ in range(n): a,b = 1-1.4*a*a+b,.3*a
            return m.head(torch.cat([a,b], 1))
        for _ in range(n): h = r*h*(1-h) if kind=='logistic' else m.w(h).tanh()
        return m.head(h)
    def model():
        cell = nn.RNN(ni, w, batch_first=True) if kind=='rnn' else large(w, gain)
        if kind=='rnn': nn.init.normal_(cell.weight_hh_l0, std=gain/w**.5)
        return Own(forward, inp=nn.Linear(ni, w), w=cell, head=nn.Linear(w, 1))
    return healthily(d, ni, model)

def deep(d):
    "A deep network with large weights, perhaps without a training that deserves the name"
    ni,w,act = d.randint(4, 12),d.choice([16,32]),d.choice([nn.Tanh,nn.ReLU])
    n,gain = (d.randint(10, 30),d.uniform(2., 4.)) if act is nn.Tanh else (d.randint(10, 40),d.uniform(1.2, 1.7))
    def model(): return nn.Sequential(nn.Linear(ni, w), *[o for _ in range(n) for o in (large(w, gain),act())], nn.Linear(w, 1))
    return healthily(d, ni, model, lr=.01, steps=(20,60))

def near_perfect(d):
    "A regression that is almost perfect from the start"
    ni,eps = d.randint(2, 12),d.log(1e-5, 1e-1)
    def data():
        x = torch.randn(n_samples, ni)
        return x,x.sum(1, keepdim=True)+eps*torch.randn(n_samples, 1)
    return healthily(d, ni, lambda: lin(ni, 1, 1., 0.), data=data, lr=d.choice([1e-3,.1,1.]), steps=(20,60))

def near_zero(d):
    "Outputs near 0, from a head that begins there"
    ni,by,c = d.randint(4, 12),d.choice([0.,1e-3,1e-2]),d.choice([0,3])
    net = body(d, ni, c or 1)
    def model():
        m = net()
        m[-1].weight.data.mul_(by)
        m[-1].bias.data.zero_()
        return m
    return healthily(d, ni, model, c=c)

def small_targets(d):
    "Outputs and targets near 0, or on different scales"
    ni,no = d.randint(4, 12),d.choice([1,3])
    by = torch.tensor([d.log(1e-4, 1e-1) for _ in range(no)])*d.choice([1.,100.])
    net,usual = body(d, ni, no),plain(d, ni, no)
    def data():
        x,y = usual()
        return x,by*y
    def loss(p, t): return F.mse_loss(p/by.to(p), t/by.to(p))
    return healthily(d, ni, lambda: Own(lambda m,x: m.body(x)*m.by, body=net(), by=by), data=data, loss=loss)

def alike(d):
    "All targets alike, or nothing but noise around a number"
    ni,at,eps = d.randint(4, 12),d.choice([0.,1.,d.log(.1, 50)]),d.choice([0.,1e-4,.1,1.])
    def data(): return torch.randn(n_samples, ni),torch.full((n_samples, 1), at)+eps*torch.randn(n_samples, 1)
    return healthily(d, ni, body(d, ni, 1), data=data)

def straight_through(hard, soft): return soft+(hard-soft).detach()
def quantized(d):
    "Quantized, binary or rounded activations, weights or outputs"
    ni,w,levels,kind = d.randint(4, 12),d.choice([16,32]),d.choice([1,4,8]),d.choice(['round','sign','output','weights','twice'])
    def rounded(h): return straight_through((levels*h).round()/levels, h)
    def forward(m, x):
        h = m.inp(x)
        if kind in ('round','twice'): h = rounded(h.relu())
        if kind=='twice': h = rounded(m.mid(h))
        if kind=='sign': h = straight_through(h.sign(), h.tanh())
        if kind=='weights':
            w = m.head.weight
            return F.linear(h.relu(), straight_through(w.sign()*w.abs().mean(), w), m.head.bias)
        p = m.head(h)
        return rounded(p) if kind=='output' else p
    return healthily(d, ni, lambda: Own(forward, inp=nn.Linear(ni, w), mid=nn.Linear(w, w), head=nn.Linear(w, 1)))

def hard_choice(d):
    "Hard attention, an argmax, the largest k, a row for each combination of signs"
    ni,c,k,kind = d.randint(6, 16),d.choice([3,4]),d.randint(2, 8),d.choice(['attention','topk','argmax','max','codes'])
    w,no = (32,dict(max=16, codes=8).get(kind, 32)) if kind in ('topk','max','codes') else (ni,ni)
    def forward(m, x):
        h = m.inp(x)
        if kind=='topk': h = torch.where(h>=h.topk(k, 1).values[:,-1:], h, torch.zeros_like(h))
        if kind=='max': h = h.view(len(h), -1, 2).amax(-1)
        if kind=='codes': h = m.codes(((h[:,:8]>0).long()<<torch.arange(8, device=h.device)).sum(1))
        if kind in ('attention','argmax'):
            p = h.softmax(1)
            h = straight_through(F.one_hot(p.argmax(1), ni).to(p.dtype), p)
            if kind=='attention': h = x*h
        return m.head(h)
    return healthily(d, ni, lambda: Own(forward, inp=nn.Linear(ni, w), codes=nn.Embedding(256, 8), head=nn.Linear(no, c)), c=c)

def argmax(d):
    "An argmax or whole numbers as outputs"
    ni,k,kind = d.randint(4, 12),d.randint(3, 6),d.choice(['argmax','whole'])
    def forward(m, x):
        p = m.body(x)
        if kind=='whole': return straight_through(p.round(), p)
        p = p.softmax(1)
        return straight_through(p.argmax(1, keepdim=True).float(), p@m.numbers)
    def data():
        x = torch.randn(n_samples, ni)
        return x,x[:,:k].argmax(1, keepdim=True).float()
    net = body(d, ni, k if kind=='argmax' else 1)
    return healthily(d, ni, lambda: Own(forward, body=net(), numbers=torch.arange(float(k))[:,None]), data=data)

def stochastic(d):
    "Dropout, noise, samples of a distribution, augmentation, stochastic depth, Gumbel noise"
    ni,w,p,s = d.randint(4, 12),d.choice([16,32,64]),d.uniform(.1, .9),d.log(.05, 1)
    kind = d.choice(['dropout','noise','sample','augment','depth','gumbel','always'])
    def forward(m, x):
        if kind=='augment' and m.training: x = x*(1+s*torch.randn_like(x[:,:1]))+s*torch.randn_like(x)
        h = m.inp(x).relu()
        if kind=='dropout': h = F.dropout(h, p, m.training)
        if kind=='always': h = F.dropout(h, p, True)
        if kind=='noise': h = h+s*torch.randn_like(h)
        if kind=='sample': h = h+(m.std(h)-1).exp()*torch.randn_like(h)
        if kind=='depth' and not (m.training and torch.rand(())<p): h = h+m.std(h).relu()
        if kind=='gumbel': h = F.gumbel_softmax(h.float(), tau=.5+s).to(h.dtype)
        return m.head(h)
    return healthily(d, ni, lambda: Own(forward, inp=nn.Linear(ni, w), std=nn.Linear(w, w), head=nn.Linear(w, 1)))

def tied(d):
    ni,k = d.randint(8, 16),d.randint(2, 6)
    def data():
        x = torch.randn(n_samples, k)@torch.randn(k, ni)/k**.5
        return x,x
    return healthily(d, ni, lambda: Own(lambda m,x: F.linear(m.inp(x), m.inp.weight.t()), inp=nn.Linear(ni, k)), data=data)

def few_per_statistic(d):
    "Norms of few values"
    ni,w = d.randint(4, 12),d.choice([8,16])
    norm = d.choice([lambda: nn.BatchNorm1d(w),lambda: nn.GroupNorm(w//2, w),lambda: nn.LayerNorm(w)])
    def model(): return nn.Sequential(nn.Linear(ni, w), norm(), nn.ReLU(), nn.Linear(w, 1))
    return healthily(d, ni, model, bs=d.choice([2,4,8]), steps=(60,120))

def sparse(d):
    "Most targets are 0"
    ni,at = d.randint(4, 12),d.uniform(1, 2)
    def data():
        x = torch.randn(n_samples, ni)
        return x,(target(d, x)-at).relu()
    return healthily(d, ni, body(d, ni, 1), data=data)

def saturated(d):
    "A classifier that is sure of itself"
    ni,c,by = d.randint(4, 16),d.randint(2, 6),d.log(5, 50)
    net,std = body(d, ni, c),d.choice([.1,.3,1.])
    def data():
        y = torch.randint(c, (n_samples,))
        return 3*torch.randn(c, ni)[y]+std*torch.randn(n_samples, ni),y
    return healthily(d, ni, lambda: Own(lambda m,x: by*m.body(x), body=net()), data=data, loss=F.cross_entropy)

def quantiles(d):
    ni,qs = d.randint(4, 12),torch.tensor([.05,.5,.95])
    def loss(p, t):
        q = qs.to(p.device)
        return torch.maximum(q*(t-p), (q-1)*(t-p)).mean()
    return healthily(d, ni, body(d, ni, 3), loss=loss)

def hinge(d):
    "A hinge loss, perhaps at 0"
    ni,by = d.randint(4, 12),d.choice([0.,9.])
    net = body(d, ni, 1)
    def data():
        x = torch.randn(n_samples, ni)
        return x,x[:,:1].sign()
    def model(): return Own(lambda m,x: m.body(x)+by*x[:,:1].sign(), body=net())
    return healthily(d, ni, model, data=data, loss=lambda p,t: (1-p*t).relu().mean())

def likelihood(d):
    "A mean and a deviation, by a likelihood that may have any sign"
    ni,by = d.randint(4, 12),d.log(.01, 10)
    def data():
        x = torch.randn(n_samples, ni)
        return x,by*(target(d, x)+.3*torch.randn(n_samples, 1))
    def loss(p, t): return F.gaussian_nll_loss(p[:,:1], t, (2*p[:,1:]).clamp(-10, 10).exp())
    return healthily(d, ni, body(d, ni, 2), data=data, loss=loss)

def moments(d):
    "A generator that is judged by moments, or a critic with a linear loss"
    ni,nz,no,kind = d.randint(2, 6),d.randint(2, 8),d.randint(2, 6),d.choice(['moments','critic'])
    net = body(d, ni+nz, no)
    def forward(m, x): return m.body(torch.cat([x, torch.randn(len(x), nz, device=x.device)], 1)).tanh()
    def data(): return torch.randn(n_samples, ni),torch.randn(n_samples, no).sign()/2
    def loss(p, t): return F.mse_loss(p.mean(0), t.mean(0))+F.mse_loss(p.std(0), t.std(0)) if kind=='moments' else 2-(p*t).mean()
    return healthily(d, ni, lambda: Own(forward, body=net()), data=data, loss=loss)

def recurrent(d):
    ni,w,n,rnn = d.randint(2, 6),d.choice([8,16]),d.randint(4, 12),d.choice([nn.GRU,nn.LSTM,nn.RNN])
    def data():
        x = torch.randn(n_samples, n, ni)
        return x,x[:,:,0].mean(1, keepdim=True)*n**.5
    def model(): return Own(lambda m,x: m.head(m.rnn(x)[0][:,-1]), rnn=rnn(ni, w, batch_first=True), head=nn.Linear(w, 1))
    return healthily(d, ni, model, data=data)

def embeddings(d):
    "The dot product of embeddings, as in collaborative filtering"
    n,k = d.randint(10, 50),d.randint(2, 8)
    u,v = torch.randn(2, n, k)
    def data():
        x = torch.randint(n, (n_samples, 2))
        return x,(u[x[:,0]]*v[x[:,1]]).sum(1, keepdim=True)/k**.5
    def forward(m, x): return (m.user(x[:,0])*m.item(x[:,1])).sum(1, keepdim=True)
    return healthily(d, 2, lambda: Own(forward, user=nn.Embedding(n, k), item=nn.Embedding(n, k)), data=data)

def transformer(d):
    w,h,n,c,p = d.choice([16,32]),d.choice([2,4]),d.randint(4, 12),d.choice([3,8]),d.choice([0.,.1])
    how = d.chance(.5)
    def data():
        x = torch.randint(20, (n_samples, n))
        return x,(x.sum(1) if how else x[:,0])%c
    def model():
        layer = nn.TransformerEncoderLayer(w, h, 2*w, p, batch_first=True, norm_first=True)
        return Own(lambda m,x: m.head(m.enc(m.emb(x)).mean(1)), emb=nn.Embedding(20, w), enc=layer, head=nn.Linear(w, c))
    return healthily(d, n, model, data=data, loss=F.cross_entropy, steps=(30,60))

def convs(d):
    c,w,norm,std = d.choice([3,4]),d.choice([8,16]),d.chance(.6),d.choice([.5,1.])
    protos = torch.randn(c, 1, 6, 6)
    def data():
        y = torch.randint(c, (n_samples,))
        return protos[y]+std*torch.randn(n_samples, 1, 6, 6),y
    def model():
        conv = nn.Conv2d(1, w, 3),*[nn.BatchNorm2d(w)]*norm,nn.ReLU()
        return nn.Sequential(*conv, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4*w, c))
    return healthily(d, 1, model, data=data, loss=F.cross_entropy)

def ensemble(d):
    "The mean of several networks"
    ni,n = d.randint(4, 12),d.randint(2, 6)
    net = body(d, ni, 1)
    def forward(m, x): return torch.stack([o(x) for o in m.members]).mean(0)
    return healthily(d, ni, lambda: Own(forward, members=nn.ModuleList([net() for _ in range(n)])))

def own_state(d):
    "Moving statistics or means of features that a module keeps by itself, or a spectral norm"
    ni,w,depth,gain = d.randint(4, 12),d.choice([16,32]),d.whole(1, 8),d.log(.5, 4)
    kind,keep = d.choice(['norm','mean','spectral']),d.choice([.5,.9,.99])
    def norm(m, x):
        mean,var = m.mean,m.var
        if m.training:
            mean,var = x.mean(0),x.var(0)
            with torch.no_grad(): m.mean,m.var = mean.float().lerp(m.mean, keep),var.float().lerp(m.var, keep)
        return (x-mean)*(var+1e-5).rsqrt()
    def mean(m, x):
        if m.training: m.mean = x.detach().float().mean(0).lerp(m.mean, keep)
        return x-m.mean.to(x.dtype)
    def spectral(m, x):
        with torch.no_grad():
            v = F.normalize(m.weight.T@m.u, dim=0)
            if m.training: m.u = F.normalize((m.weight@v).float(), dim=0)
        return F.linear(x, m.weight/(m.u@m.weight@v))
    def block():
        if kind=='spectral': return [Own(spectral, weight=large(w, gain).weight, u=F.normalize(torch.randn(w), dim=0)),nn.ReLU()]
        return [large(w, gain),Own(norm if kind=='norm' else mean, mean=torch.zeros(w), var=torch.ones(w)),nn.ReLU()]
    def model(): return nn.Sequential(nn.Linear(ni, w), nn.ReLU(), *[m for _ in range(depth) for m in block()], nn.Linear(w, 1))
    return healthily(d, ni, model)

def constant(d):
    "Outputs that do not depend on inputs, or a learning rate of 0"
    ni,kind = d.randint(4, 12),d.choice(['constant','lr'])
    net = body(d, ni, 1)
    def model(): return Own(lambda m,x: 0*m.body(x)+m.b, body=net(), b=nn.Parameter(torch.ones(1)))
    return healthily(d, ni, model) if kind=='constant' else healthily(d, ni, net, lr=0.)

def unused_level(d):
    "A feature at a level that does not matter, or a level that hardly does"
    ni,level = d.randint(4, 12),d.log(100, 2000)
    net,usual = body(d, ni, 1),plain(d, ni)
    kind,times = d.choice(['feature','level']),d.log(1, 10)
    def forward(m, x):
        h = m.body(x[:,:ni])
        return h+.001*m.spare(x[:,ni:]).sin() if kind=='feature' else times*level*(h+1)
    def data():
        x,y = usual()
        return torch.cat([x,level+torch.randn(n_samples, 1)], 1),y if kind=='feature' else times*level*(y+1)
    def loss(p, t): return F.mse_loss(p, t) if kind=='feature' else F.mse_loss(p/(times*level), t/(times*level))
    return healthily(d, ni, lambda: Own(forward, body=net(), spare=nn.Linear(1, 1)), data=data, loss=loss)

healthy = [ordinary, recurrence, deep, near_perfect, near_zero, small_targets, alike, quantized, hard_choice, argmax, stochastic, tied,
           few_per_statistic, sparse, saturated, quantiles, hinge, likelihood, moments, recurrent, embeddings, transformer, convs,
           ensemble, own_state, constant, unused_level]
