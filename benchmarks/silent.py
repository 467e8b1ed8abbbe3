"""Small trainings that half precision makes wrong though all numbers are finite, and healthy ones

What is `wrong` learns in fp32, and ends clearly worse in unprotected half precision, because numbers are rounded. In what is `healthy`,
half precision is as good as fp32, or fp32 is as far off once its layers are rounded: nothing is to be promoted there, and nothing said."""
import argparse,json,math,time,warnings
from collections import namedtuple
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import fastai,torch
import torch.nn.functional as F
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import Callback,default_device,nn
    import fastai_amp16.all # noqa: F401 (it adds methods to `Learner`)
    from fastai_amp16.precision.plan import PrecisionPlan,is_norm
from fastais import fastais
from hostile import classes,curve,learner,r2
from machine import machine

Program = P = namedtuple('Program', 'what make epochs lr end', defaults=(2, 1e-2, 'fit')) # all metrics are at most 1: accuracy or R²

class Own(nn.Module):
    "A module with `parts`, modules and buffers, whose forward pass is `f(self, x)`"
    def __init__(self, f, **parts):
        super().__init__()
        self.f = f
        for k,v in parts.items(): self.register_buffer(k, v) if type(v) is torch.Tensor else setattr(self, k, v)
    def forward(self, x): return self.f(self, x)

def own(f, **parts):
    "A function that makes a module of `f` and of what the functions `parts` make"
    return lambda: Own(f, **{k: p() for k,p in parts.items()})
def net(*parts): return lambda: nn.Sequential(*[p() for p in parts])
def lin(ni, no, weight=None, at=None, **kwargs):
    "A function that makes a linear layer, with these weights and all biases `at`"
    def make():
        l = nn.Linear(ni, no, **kwargs)
        if weight is not None: l.weight.data.copy_(torch.as_tensor(weight))
        if at is not None: l.bias.data.fill_(at)
        return l
    return make
def mlp(ni, no, **kwargs): return net(lin(ni, 32), nn.ReLU, lin(32, no, **kwargs))
def const(x): return lambda: torch.as_tensor(x)
def fixed(weight):
    "A layer that is not trained, such as a filter bank, a wavelet or a moving average"
    return lambda: lin(len(weight[0]), len(weight), weight, bias=False)().requires_grad_(False)
smoothed = fixed((torch.eye(16)+torch.eye(16).roll(1, 0))/2) # means of neighbors

def classify(data, model, in_order=False, **kwargs):
    "A function that makes a learner; its training data comes in the order of time or not"
    def make(seed):
        learn = learner(seed, data, model, **{'n':480, **kwargs})
        learn.dls.train.shuffle = not in_order
        return learn
    return make
def regress(data, model, **kwargs): return classify(data, model, **{**dict(loss_func=F.mse_loss, metric=r2), **kwargs})
def trained(make):
    "As `make`, after a fit in fp32"
    def f(seed):
        learn = make(seed)
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 1e-2)
        return learn
    return f
def changed(f, data=curve):
    "`data`, changed by `f`, a function of inputs and targets"
    return lambda n: f(*data(n))
def shifted(by, std=1., **kwargs): return changed(lambda x,y: (by+std*x,y), partial(classes, **kwargs))

# %% angles: products that autocast computes in half precision
def waves(angle): return torch.cat([angle.sin(), angle.cos()], -1)
def angles(*freqs): return own(lambda m,t: waves(t[...,None]@m.freqs), freqs=const([freqs]))
def periodic(*freqs): return own(lambda m,t: m.head(m.angles(t).flatten(1)), angles=angles(*freqs), head=lin(2*len(freqs), 1))

def attend(m, t):
    h = m.emb(m.angles(t))
    return m.head((h+F.scaled_dot_product_attention(*m.qkv(h).chunk(3, -1)))[:,-1])
located = own(attend, angles=angles(1., .3, .1), emb=lin(6, 16), qkv=lin(16, 48), head=lin(16, 1))
def places(n):
    t = torch.randint(3000, 7000, (n, 1))+torch.arange(6.)
    return t,t[:,-1:].sin()+(0.3*t[:,-1:]).cos()

def years(n):
    x = 2000+24*torch.rand(n, 1)
    return x,(2*math.pi*x).sin()+0.5*(4*math.pi*x).cos()
def texture(n):
    x = torch.rand(n, 2)
    return x,(2*math.pi*(300*x[:,:1]+600*x[:,1:])).sin()+(2*math.pi*(400*x[:,:1]-700*x[:,1:])).cos()
def paths(n):
    x = 300+10*torch.rand(n, 3)
    return x,(2*math.pi*x.sum(1, keepdim=True)+0.5).cos()
def ids(n):
    t = 1900.+torch.arange(n)[:,None]
    return t,(math.pi/2*t).sin()+(math.pi*t).cos()
def events(n):
    gaps = torch.rand(n, 5)
    return 5000+torch.cat([torch.zeros(n, 1), gaps.cumsum(1)], 1),gaps[:,:2].sum(1, keepdim=True)-gaps[:,3:4]

# %% differences of large numbers
def center(m, x):
    h = m.inp(x)
    return m.body(h-h.mean(1, keepdim=True))
centered = own(center, inp=smoothed, body=mlp(16, 4))

def spread(m, x):
    h = m.inp(x)
    return m.body((h*h).mean(1)-h.mean(1)**2)
def volatile(n):
    std = 0.5+torch.rand(n, 4)
    return 80+std[:,None]*torch.randn(n, 256, 4),std[:,:1]**2-std[:,1:2]**2

def running(m, x):
    "A batch norm of one's own: a batch is normalized by its own statistics, and a moving average of squares serves for validation"
    h = m.inp(x)
    if not m.training: return m.body((h-m.mean)*(m.square-m.mean**2).clamp(1e-4).rsqrt())
    with torch.no_grad(): m.mean,m.square = m.mean.lerp(h.mean(0).float(), 0.5),m.square.lerp((h*h).mean(0).float(), 0.5)
    return m.body((h-h.mean(0))/h.std(0))

def alternate(m, x):
    "Changes its sign from batch to batch, by a count of batches that begins where an earlier fit has ended"
    sign = (m.count@m.freq).cos()
    if m.training: m.count = m.count+1
    return sign*m.body(x)
def alternating(n):
    (x,y),i = curve(n, noise=0.),torch.arange(n)[:,None]//32
    return x,y*torch.where((i%2==0) | (i>=16), 1., -1.)

def distances(m, x):
    a,b = m.inp(x),m.proto
    return 2*a@b.T-(a*a).sum(1, keepdim=True)-(b*b).sum(1)
def cosines(m, x): return F.normalize(x, dim=1)@F.normalize(m.proto, dim=1).T/1e-4
def protos(at): return lambda: nn.Parameter(at+torch.randn(4, 16))
conv_net = net(partial(nn.Conv2d, 1, 8, 3, bias=False), partial(nn.GroupNorm, 8, 8), nn.ReLU, nn.Flatten, lin(128, 4))
def with_outlier(x, y): return torch.cat([0.1*x[:,:15], torch.full((len(x), 1), 4e4)], 1),y

def rms(m, x):
    "The squares are infinite; what is divided by an infinity is 0"
    h = m.inp(x)*m.gain
    if m.training: m.gain = m.gain*m.growth
    return m.body(h*torch.rsqrt((h*h).mean(-1, keepdim=True)+1e-6))
def own_rms(growth=1.): return own(rms, inp=lin(16, 16), body=mlp(16, 4), gain=const(1.), growth=const(growth))

# %% high levels
def forecast(m, x):
    trend = m.trend(x)
    return trend+m.rest(x-x.mean(1, keepdim=True)).to(trend.dtype)
def forecasts(n):
    x = torch.randn(n, 16)
    x = 1500+0.3*(x-x.mean(1, keepdim=True))
    return x,x[:,:2].sum(1, keepdim=True)-1500

class LevelNorm(nn.Module):
    "Takes a level away, and puts it back"
    def forward(self, x, back=False): return x+x.new_tensor(1500.) if back else x-1500.

# %% what goes wrong later
def curriculum(n):
    x,y = classes(n, noise=0.5)
    return torch.linspace(1, 200, n).clamp(max=100)[:,None]*100+x,y
def later(n):
    x,y = classes(n, noise=0.5)
    x[-256:] += 10_000
    return x,y
def larger(m, x):
    "Which of two numbers is larger? Where half precision cannot tell, the derivative is 3e4"
    a,b = m.a(x),m.b(x)
    return m.head(torch.cat([a-100, 0.1*((a-b)*3e5).tanh()], 1))

two_pi = 2*math.pi
wrong = dict(
    positions=P('positions from 3000 on in a small transformer', regress(places, located)),
    years=P('decimal years', regress(years, periodic(two_pi, 2*two_pi)), lr=5e-2),
    fourier=P('Fourier features', regress(texture, own(lambda m,x: m.head(waves(two_pi*x@m.b)), head=lin(8, 1),
              b=const([[300.,-500.,700.,400.], [600.,400.,300.,-700.]]))), lr=5e-2),
    phases=P('the phase of a wave after 900 wavelengths', regress(paths, own(lambda m,x: m.head(waves(two_pi*m.path(x))),
             path=fixed([[1.,1.,1.]]), head=lin(2, 1))), lr=5e-2),
    timestamps=P('the time between events', regress(events, own(lambda m,t: m.body(t@m.diff), body=mlp(5, 1),
                 diff=const(torch.eye(6, 5).roll(1, 0)-torch.eye(6, 5)))), lr=2e-2),
    centering=P('`h-h.mean()` of numbers around 1500', classify(shifted(1500, .3), centered), lr=2e-2),
    variance=P('a variance as E[x²]-E[x]²', regress(volatile, own(spread, inp=fixed(torch.eye(4)), body=mlp(4, 1)))),
    running=P('a moving average of squares', classify(shifted(230), own(running, inp=smoothed, body=mlp(16, 4),
              mean=const(torch.zeros(16)), square=const(torch.ones(16))))),
    counter=P('a count of batches in a buffer', regress(alternating, own(alternate, body=mlp(8, 1), count=const([[3000.]]),
              freq=const([[math.pi]])), in_order=True, n=512), lr=3e-2),
    distances=P('distances by |a|²+|b|²-2ab', classify(shifted(40), own(distances, inp=smoothed, proto=protos(40))), lr=0.1),
    temperature=P('cosines, by a temperature of 1e-4', classify(shifted(60), own(cosines, proto=protos(60))), lr=0.1),
    images=P('raw images around 4500', classify(shifted(4500, 0.7, shape=(1,6,6)), conv_net)),
    outlier=P('a feature of 40,000 beside those of 0.1', classify(changed(with_outlier, classes), net(lin(16, 32, bias=False),
              partial(nn.BatchNorm1d, 32, track_running_stats=False), nn.ReLU, lin(32, 4)))),
    rms=P('a root mean square that divides by an infinity', classify(shifted(0, 1000.), own_rms())),
    forecast=P('a forecast as trend and rest', regress(forecasts, own(forecast, trend=fixed(torch.full((1, 16), 1/16)), rest=mlp(16, 1))),
               lr=2e-2),
    level_norm=P('a module called `LevelNorm` that puts a level back', regress(forecasts, own(lambda m,x: m.norm(m.body(m.norm(x)),
                 back=True), norm=LevelNorm, body=mlp(16, 1))), lr=2e-2),
    bias=P('a bias at the level of the targets', regress(changed(lambda x,y: (x,1500+0.3*y), partial(curve, noise=0.)),
           mlp(8, 1, at=1500.)), lr=2e-2),
    logits=P('logits that all stand at 30,000', classify(classes, mlp(16, 4, at=3e4)), lr=5e-3),
    ids=P('ids that grow beyond 2048', regress(ids, periodic(math.pi/2, math.pi), in_order=True), lr=5e-2),
    curriculum=P('a curriculum of growing numbers', classify(curriculum, centered, in_order=True), lr=2e-2),
    gain=P('a gain that grows, before a root mean square', classify(classes, own_rms(1.3))),
    later=P('larger numbers in the validation set', classify(later, centered), lr=2e-2),
    steep=P('gradients that are far too large', regress(changed(lambda x,y: (x,x[:,:3].sum(1, keepdim=True))), own(larger,
            a=lin(8, 2, at=100.), b=lin(8, 2, at=100.), head=lin(4, 1))), lr=5e-2),
    validate=P('`validate` after a fit in fp32', trained(classify(shifted(1500, 500.), own_rms())), 0, 0, 'validate'),
    get_preds=P('`get_preds` after a fit in fp32', trained(regress(places, located)), 0, 0, 'get_preds'))

# %% healthy programs
def deep(act, gain, depth, d=32):
    "`depth` layers whose outputs are `gain` times as large as their inputs, before activations"
    def layer(): return lin(d, d, gain/d**0.5*torch.randn(d, d))()
    return net(lin(8, d), *[layer,act]*depth, lin(d, 1))
def logistic(m, x):
    h = m.inp(x).sigmoid()
    for _ in range(14): h = 3.99*h*(1-h)
    return m.head(h)
def straight_through(hard, soft): return soft+(hard-soft).detach()
def rounded(m, x):
    h = m.inp(x).relu()
    return m.head(straight_through((4*h).round()/4, h))
def whole(m, x):
    p = m.body(x)
    return straight_through(p.round(), p)
def argmax(m, x):
    p = m.body(x).softmax(1)
    return straight_through(p.argmax(1, keepdim=True).float(), p@m.k)
def hard_attention(m, x):
    p = m.score(x).softmax(1)
    return m.head(x*straight_through(F.one_hot(p.argmax(1), 16).to(p.dtype), p))
def top_k(m, x):
    h = m.inp(x).relu()
    return m.head(torch.where(h>=h.topk(8, 1).values[:,-1:], h, 0))
def augmented(m, x): return m.body(x*(1+0.3*torch.randn_like(x[:,:1]))+0.3*torch.randn_like(x))
def sampled(m, x):
    mean,log_std = m.inp(x).chunk(2, 1)
    return m.head(mean+(log_std-1).exp()*torch.randn_like(mean))
def generated(m, x): return m.body(torch.cat([x, torch.randn_like(x)], 1)).tanh()
def scaled(by, no=1): return own(lambda m,x: m.body(x)*m.by, body=mlp(8, no), by=const(by))
def ratings(n):
    x,(u,v) = torch.randint(20, (n, 2)),torch.randn(2, 20, 4)
    return x,(u[x[:,0]]*v[x[:,1]]).sum(1, keepdim=True)
def low_rank(n):
    x = torch.randn(n, 4)@torch.randn(4, 16)
    return x,x
def sequences(n):
    x = torch.randn(n, 8, 4)
    return x,x[:,:,0].mean(1, keepdim=True)
units = torch.tensor([1.,1e-3,100.])
def by_unit(p, t): return F.mse_loss(p/units.to(p), t/units.to(p))
def hinge(p, t): return (1-p*t).relu().mean()
def agree(p, t): return (p.sign()==t).float().mean()
def moments(p, t): return F.mse_loss(p.mean(0), t.mean(0))+F.mse_loss(p.std(0), t.std(0))

healthy = dict(
    untrained=P('an untrained deep ReLU network', regress(curve, deep(nn.ReLU, 2**0.5, 40)), 1, 1e-6),
    logistic=P('a chaotic recurrence, the logistic map', regress(curve, own(logistic, inp=lin(8, 16), head=lin(16, 1))), 1, 1e-3),
    tanh=P('a deep tanh network with large weights, chaotic', regress(curve, deep(nn.Tanh, 3., 30)), 1, 1e-3),
    dropout=P('dropout', classify(classes, net(lin(16, 64), nn.ReLU, nn.Dropout, lin(64, 4)))),
    augmentation=P('random augmentation in the model', classify(classes, own(augmented, body=mlp(16, 4)))),
    sampling=P('a sample of a distribution, as in a VAE', regress(curve, own(sampled, inp=lin(8, 32), head=lin(16, 1))), lr=2e-2),
    small=P('outputs near 0', regress(changed(lambda x,y: (x,1e-4*y)), scaled(1e-4), loss_func=lambda p,t: 1e8*F.mse_loss(p, t)), lr=2e-2),
    zero_head=P('a head that starts at 0', regress(curve, mlp(8, 1, weight=0., at=0.)), lr=2e-2),
    argmax=P('an argmax as output', regress(changed(lambda x,y: (x,x[:,:4].argmax(1, keepdim=True).float())), own(argmax, body=mlp(8, 4),
             k=const([[0.],[1.],[2.],[3.]]))), lr=2e-2),
    rounded=P('a quantized layer', regress(curve, own(rounded, inp=lin(8, 32), head=lin(32, 1))), lr=2e-2),
    whole=P('whole numbers as outputs', regress(changed(lambda x,y: (x,4*y)), own(whole, body=mlp(8, 1))), lr=5e-2),
    batches_of_2=P('batch norm of two samples', classify(classes, net(lin(16, 16), partial(nn.BatchNorm1d, 16), nn.ReLU, lin(16, 4)),
                   n=60, bs=2), 1),
    generator=P('a generator, judged by moments', regress(lambda n: (torch.randn(n, 8),torch.randn(n, 8).sign()/2), own(generated,
                body=mlp(16, 8)), loss_func=moments, metric=lambda p,t: 1-moments(p, t))),
    fitted=P('an almost perfect regression', regress(changed(lambda x,y: (x,x.sum(1, keepdim=True)+1e-4*y)), lin(8, 1, 1., 0.)), 1, 1e-6),
    hard_attention=P('hard attention', classify(classes, own(hard_attention, score=lin(16, 16), head=lin(16, 4)))),
    sparse=P('sparse targets', regress(changed(lambda x,y: (x,(x[:,:1]-1.5).relu())), mlp(8, 1)), lr=2e-2),
    hinge=P('a hinge loss at 0', regress(changed(lambda x,y: (x,x[:,:1].sign())), own(lambda m,x: m.body(x)+9*x[:,:1].sign(),
            body=mlp(8, 1)), loss_func=hinge, metric=agree), 1),
    saturated=P('a saturated classifier', classify(partial(classes, noise=0.1), own(lambda m,x: 30*m.body(x), body=mlp(16, 4)))),
    scales=P('outputs on different scales', regress(changed(lambda x,y: (x,y*units)), scaled(units, 3), loss_func=by_unit), lr=2e-2),
    dot=P('the dot product of embeddings', regress(ratings, own(lambda m,x: (m.user(x[:,0])*m.item(x[:,1])).sum(1, keepdim=True),
          user=partial(nn.Embedding, 20, 4), item=partial(nn.Embedding, 20, 4))), lr=0.2),
    tied=P('tied weights', regress(low_rank, own(lambda m,x: F.linear(m.inp(x), m.inp.weight.t()), inp=lin(16, 8)))),
    gru=P('a GRU', regress(sequences, own(lambda m,x: m.head(m.rnn(x)[0][:,-1]), rnn=partial(nn.GRU, 4, 16, batch_first=True),
          head=lin(16, 1))), lr=2e-2),
    ensemble=P('the mean of an ensemble', regress(curve, own(lambda m,x: torch.stack([l(x) for l in m.members]).mean(0),
               members=lambda: nn.ModuleList([mlp(8, 1)() for _ in range(5)])))),
    top_k=P('the largest 8 of 64 activations', classify(classes, own(top_k, inp=lin(16, 64), head=lin(64, 4)))),
    constant=P('outputs that do not depend on inputs', regress(curve, own(lambda m,x: 0*m.body(x)+m.b, body=mlp(8, 1),
               b=lambda: nn.Parameter(torch.ones(1)))), 1),
    lr_0=P('a learning rate of 0', regress(curve, mlp(8, 1)), 1, 0.),
    conv_net=P('a convolutional network', classify(partial(classes, shape=(1,6,6)), conv_net)))

# %% the table
contenders = dict(fp32='to_fp32', fastai_fp16='to_fp16', fastai_bf16='to_bf16', fp16='to_fp16_dynamic', bf16='to_bf16_dynamic')
autocasts = dict(to_fp16=torch.float16, to_bf16=torch.bfloat16)

class Skips(Callback):
    "Counts the steps that were skipped"
    n = 0
    def after_cancel_step(self): self.n += 1

def ends(learn, p):
    "The final accuracy or R²"
    if p.end=='get_preds': return float(learn.metrics[0].func(*learn.get_preds()))
    if p.end=='validate': return float(learn.validate()[-1])
    learn.fit(p.epochs, p.lr)
    return float(learn.recorder.values[-1][-1])

def in_half(learn):
    "The number of modules with weights that compute in half precision, and of all of them besides norms"
    mp = learn.mixed_precision
    plan = PrecisionPlan(learn.model, mp.dtype, mp.keeps(learn.model))
    those = [m for m in learn.model.modules() if any(True for _ in m.parameters(recurse=False)) and not is_norm(m)]
    return sum(m not in plan.in_fp32 for m in those),len(those)

def train(p, to):
    "How the program `p` ends after the learner's method `to`, and what that took; without a fit, autocast alone stands for fastai's"
    learn,calls,skips = p.make(0),[],Skips()
    learn.model.register_forward_pre_hook(lambda *_: calls.append(1))
    auto = p.end!='fit' and autocasts.get(to)
    kwargs = dict(init_scale=1.) if to=='to_fp16' else {} # low, so that no step is skipped: what is left is rounding
    if not auto: getattr(learn, to)(**kwargs)
    learn.add_cb(skips)
    with warnings.catch_warnings(record=True) as told, fastais(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        with torch.autocast(default_device().type, auto) if auto else nullcontext(): res = dict(score=ends(learn, p))
    res.update(skipped=skips.n, passes=len(calls)/(p.epochs*(len(learn.dls.train)+1) or 1))
    if not to.endswith('_dynamic'): return res
    mp,(half,n) = learn.mixed_precision,in_half(learn)
    told = [str(w.message) for w in told if 'On a CPU, convolutions' not in str(w.message)]
    return {**res, 'promoted':[str(o) for o in mp.promoted], 'half':half, 'of':n, 'rerun':mp.n_rerun, 'told':told}

def row(kind, name, p):
    start,res = time.perf_counter(),dict(kind=kind, name=name, what=p.what)
    for k,to in contenders.items():
        try: res[k] = train(p, to)
        except Exception as e: res[k] = dict(score=math.nan, told=[f'{type(e).__name__}: {e}'])
    return {**res, 'seconds':time.perf_counter()-start}

def show(r):
    def ours(o):
        if 'of' not in o: return o['told']
        return f"{o['half']}/{o['of']} half, {o['passes']:.2f} passes, told {len(o['told'])}, {o['promoted']}"
    print(f"{r['name']:14}", *(f"{r[k]['score']:8.3f}" for k in contenders), f"{r['seconds']:4.1f}s", r['fastai_fp16'].get('skipped'),
          *(f'| {ours(r[k])}' for k in ('fp16','bf16')), flush=True)

def main(args=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--only', nargs='+', choices=[*wrong,*healthy], default=[*wrong,*healthy], metavar='NAME', help='which programs')
    p.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'), help='file for the results')
    a = p.parse_args(args)
    torch.set_num_threads(1)
    print(f"{'':14}", *(f'{k[-8:]:>8}' for k in contenders), ' time, steps skipped by fastai | fp16 | bf16')
    rows = []
    for kind,zoo in dict(wrong=wrong, healthy=healthy).items():
        for name in [o for o in zoo if o in a.only]:
            rows.append(row(kind, name, zoo[name]))
            show(rows[-1])
    a.out.write_text(json.dumps(dict(machine=machine(), fastai=fastai.__version__, rows=rows), indent=1)+'\n')

# %% what the page says
near = 0.05 # the accuracy or R² by which a program that ends as fp32 may be worse

def right(rows, k):
    "The rows of programs that end as in fp32 with contender `k`"
    return [r for r in rows if r[k]['score']>r['fp32']['score']-near]

def claim(rows):
    "How many programs end as in fp32, and of how many healthy ones something is said"
    lost,fine = [[r for r in rows if r['kind']==kind] for kind in ('wrong','healthy')]
    ns = {k: len(right(lost, k)) for k in contenders}
    alarms = {k: [f"`{r['name']}`" for r in fine if r[k]['told'] or r[k]['promoted']] for k in ('fp16','bf16')}
    res = (f"Of {len(lost)} trainings that half precision makes wrong without an infinity, {ns['fp16']} end as in fp32 with "
           f"`to_fp16_dynamic`, and {ns['bf16']} with `to_bf16_dynamic`; {ns['fastai_fp16']} with fastai's `to_fp16`, and "
           f"{ns['fastai_bf16']} with its `to_bf16`. "
           f"Of {len(fine)} healthy or chaotic ones, nothing is said of {len(fine)-len(alarms['fp16'])} in fp16")
    res += f" and of {len(fine)-len(alarms['bf16'])} in bf16"
    return res+''.join(f'; {k} promotes layers of {", ".join(os)}' for k,os in alarms.items() if os)

def table(rows):
    "A Markdown table of the programs that half precision makes wrong; bold where one does not end as in fp32"
    def score(r, k): return ('{:.3f}' if r in right([r], k) else '**{:.3f}**').format(max(r[k]['score'], -9.999))
    def kept(r, k): return ', '.join(f'`{o}`' for o in r[k].get('promoted', ())) or '–'
    def share(r): return f"{r['fp16']['half']} of {r['fp16']['of']}" if 'of' in r['fp16'] else '–'
    head = ['what loses numbers', 'fp32', "`to_fp16`", "`to_bf16`", '`to_fp16_dynamic`', '`to_bf16_dynamic`', 'kept in fp32', 'in bf16',
            'layers left in fp16']
    lines = [head, ['---',*['--:']*5,'---','---','--:']]
    rows = [r for r in rows if r['kind']=='wrong']
    lines += [[r['what'].replace('|', '\\|'), *(score(r, k) for k in contenders), kept(r, 'fp16'), kept(r, 'bf16'), share(r)] for r in rows]
    return '\n'.join('| '+' | '.join(o)+' |' for o in lines)

if __name__=='__main__': main()
