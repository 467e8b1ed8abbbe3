"`FusedAdam` beside fastai's `Adam` and torch's `AdamW`, step for step"
import pickle
from copy import deepcopy
import pytest,torch
from fastai.basics import Adam,DataLoader,DataLoaders,Lamb,Larc,Learner,QHAdam,RAdam,default_device,merge,nn,partial,ranger,set_seed
from fastai_amp16.optim.optimizer import Adam16,AdamW16,FusedAdam,Lamb16,Larc16,QHAdam16,RAdam16,RMSProp16,ranger16

def params(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(s, dtype=dtype)) for s in [(3,4),(5,),(2,3,2,2),(1,),(4,4)]]

def make(opt_func, ps, **kwargs):
    opt = opt_func([ps[:2],ps[2:4],ps[4:]], lr=0.1, **kwargs)
    for p in (ps[1],ps[3]): opt.state[p]['do_wd'] = False
    return opt

def step(opt, ps, i, seed=1):
    torch.manual_seed(seed*100+i)
    for p in ps: p.grad = torch.randn_like(p)*10**torch.randn(())
    opt.step()
    opt.zero_grad()

def close(a, b, **kw):
    for x,y in zip(a, b): torch.testing.assert_close(x, y, **kw)

@pytest.mark.parametrize('decouple_wd', [True,False])
@pytest.mark.parametrize('eps', [1e-8,1e-4])
def test_is_fastais_adam(decouple_wd, eps):
    "With schedules of lr (sliced), momentum and weight decay, in every step"
    (ours,a),(ref,b) = [(make(f, ps, decouple_wd=decouple_wd, eps=eps), ps) for f,ps in ((FusedAdam,params()),(Adam,params()))]
    for i in range(30):
        for opt,ps in ((ours,a),(ref,b)):
            opt.set_hypers(lr=slice(1e-3*(i+1), 0.05), mom=0.95-0.003*i, sqr_mom=0.99-0.001*i, wd=0.1/(i+1))
            step(opt, ps, i)
        close(a, b, rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('dtype', [torch.float32,torch.float64])
def test_is_torchs_adamw(dtype):
    a,b = params(dtype=dtype),params(dtype=dtype)
    ours = make(FusedAdam, a, wd=0.1, eps=1e-4, sqr_mom=0.99)
    ref = torch.optim.AdamW([dict(params=[p], weight_decay=0. if i in (1,3) else 0.1) for i,p in enumerate(b)],
                            lr=0.1, betas=(0.9,0.99), eps=1e-4)
    for i in range(20):
        step(ours, a, i)
        step(ref, b, i)
        close(a, b, rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('first,second', [(FusedAdam,Adam), (Adam,FusedAdam), (FusedAdam,FusedAdam)])
def test_checkpoints_go_both_ways(first, second, tmp_path):
    def learner(f):
        set_seed(0)
        ds = [(torch.randn(4),torch.randn(1)) for _ in range(32)]
        dls = DataLoaders(DataLoader(ds, bs=8),DataLoader(ds, bs=8), device=default_device())
        return Learner(dls, nn.Sequential(nn.Linear(4,8, bias=False), nn.BatchNorm1d(8), nn.Linear(8,1)), nn.MSELoss(), f, path=tmp_path)
    def fit(learn):
        with learn.no_bar(), learn.no_logging(): learn.fit(2, 0.01, wd=0.1)
        return learn
    a = fit(learner(first))
    a.save('a')
    b = learner(second).load('a')
    assert [sorted(s) for s in b.opt.state_dict()['state']]==[sorted(s) for s in a.opt.state_dict()['state']]
    fit(a),fit(b)
    close(a.model.parameters(), b.model.parameters(), rtol=1e-5, atol=1e-6)

def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="no complex parameters: use fastai's Adam"): make(FusedAdam, params(dtype=torch.complex64))

def test_wd_bn_bias_false_is_honoured():
    "No gradient but decay: only the weight of the linear layer shrinks"
    ds = [(torch.randn(4),torch.randn(4)) for _ in range(8)]
    model = nn.Sequential(nn.Linear(4,4), nn.BatchNorm1d(4))
    for p in model.parameters(): p.data.fill_(1.)
    learn = Learner(DataLoaders(DataLoader(ds, bs=8),DataLoader(ds, bs=8)), model, lambda p,t: 0*p.sum(), AdamW16, wd=0.5)
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.1)
    assert [round(p.mean().item(), 4) for p in model.parameters()]==[0.95,1,1,1]

def test_frozen_parameters_are_left_alone():
    ps = params()
    opt = make(FusedAdam, ps, wd=0.1)
    step(opt, ps, 0)
    opt.freeze_to(1)
    frozen,states = [p.detach().clone() for p in ps[:2]],deepcopy([opt.state[p] for p in ps[:2]])
    for p in ps[:2]: p.grad = torch.ones_like(p) # even if somebody gave them a gradient
    for _ in range(3):
        for p in ps[2:]: p.grad = torch.randn_like(p)
        opt.step()
    assert all(torch.equal(p, f) for p,f in zip(ps, frozen)) and states[0]['step']==opt.state[ps[0]]['step']==1
    opt.zero_grad()
    assert all(p.grad is None for p in ps)

def test_parameters_at_different_steps():
    "Unfrozen later: each has its own count"
    (ours,a),(ref,b) = [(make(f, ps), ps) for f,ps in ((FusedAdam,params()),(Adam,params()))]
    for i in range(6):
        for opt,ps in ((ours,a),(ref,b)):
            torch.manual_seed(i)
            for j,p in enumerate(ps): p.grad = torch.randn_like(p) if i>j else None
            opt.step()
        close(a, b, rtol=1e-5, atol=1e-6)
    assert [ours.state[p]['step'] for p in a]==[5,4,3,2,1]

def test_one_call_per_group():
    from torch.utils._python_dispatch import TorchDispatchMode
    class Calls(TorchDispatchMode):
        n,other = 0,0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += 'fused_adam' in func.name()
            self.other += 'fused_adam' not in func.name()
            return func(*args, **(kwargs or {}))
    ps = [nn.Parameter(torch.randn(3)) for _ in range(161)]
    opt = FusedAdam([ps[:60],ps[60:]], lr=0.1)
    opt.set_hypers(lr=slice(0.01,0.1))
    for p in ps[:10]: opt.state[p]['do_wd'] = False
    for _ in range(2):
        for p in ps: p.grad = torch.randn_like(p)
        with Calls() as c: opt.step()
    assert c.n==3 and c.other<=3

def test_memory_formats_are_not_mixed_up():
    "The kernel walks through memory: a parameter that became channels_last after its state was made, and gradients of other strides"
    (ours,a),(ref,b) = [(make(f, ps), ps) for f,ps in ((FusedAdam,params()),(Adam,params()))]
    for i in range(4):
        for opt,ps in ((ours,a),(ref,b)):
            torch.manual_seed(i)
            if i==2: ps[2].data = ps[2].data.contiguous(memory_format=torch.channels_last)
            for p in ps: p.grad = torch.randn_like(p)
            ps[4].grad = torch.randn(4,4).t()
            ps[0].grad = torch.randn(()).expand(3,4)
            opt.step()
        close(a, b, rtol=1e-5, atol=1e-6)

def test_parameters_that_are_views():
    "A pretrained convolution cut to one channel: what lies in the gaps belongs to somebody else"
    def run(f):
        torch.manual_seed(0)
        base = torch.randn(4,3,3,3)
        p = nn.Parameter(base[:,:1])
        opt,other = f([p], lr=0.1),base[:,1:].clone()
        for i in range(3): step(opt, [p], i)
        assert torch.equal(base[:,1:], other) and p.data_ptr()==base.data_ptr()
        return p
    close([run(FusedAdam)], [run(Adam)], rtol=1e-5, atol=1e-6)

def test_several_dtypes():
    ps,qs = [[*params(0), *params(1, torch.float64)] for _ in range(2)]
    for o,f in ((ps,FusedAdam),(qs,Adam)):
        opt = f(o, lr=0.01)
        for i in range(3): step(opt, o, i)
    close(ps, qs, rtol=1e-5, atol=1e-6)

def test_pickles_and_refuses_closures():
    ps = params()
    opt = make(FusedAdam, ps)
    step(opt, ps, 0)
    again = pickle.loads(pickle.dumps(opt))
    assert again.hypers==opt.hypers and len(again.all_params())==5
    with pytest.raises(NotImplementedError): opt.step(lambda: 0)

@pytest.mark.parametrize('f,ref', [(AdamW16,Adam), (Adam16,partial(Adam, decouple_wd=False)), (RAdam16,RAdam), (Lamb16,Lamb),
                                   (QHAdam16,QHAdam), (Larc16,Larc), (ranger16,ranger)])
def test_partials_are_fastais_with_the_eps_of_its_adam(f, ref):
    a,b = params(),params()
    opts = f(a, lr=0.01),ref(b, lr=0.01, eps=Adam([torch.zeros(1)], lr=0.01).hypers[0]['eps'])
    for i in range(12):
        step(opts[0], a, i)
        step(opts[1], b, i)
    close(a, b, rtol=1e-5, atol=1e-6)
    assert opts[0].hypers[0]==opts[1].hypers[0] and torch.tensor(opts[0].hypers[0]['eps']).half()>0 and f.__doc__

def test_adamw16_is_fastais_adam_as_it_comes():
    "Whoever replaces one by the other changes nothing but the number of calls"
    ours,theirs = [o([torch.zeros(1)], lr=0.01).hypers[0] for o in (AdamW16,Adam)]
    assert ours==theirs

def test_rmsprop16_has_its_eps():
    p = nn.Parameter(torch.ones(1))
    opt = RMSProp16([p], lr=1., sqr_mom=0.)
    p.grad = torch.tensor([1e-5])
    opt.step()
    assert p.item()==pytest.approx(0.5, rel=1e-4) # 1 - 1e-5/(1e-5+1e-5)

@pytest.mark.parametrize('opt_func', [AdamW16, Adam16, Lamb16, RMSProp16, partial(RMSProp16, mom=0.9), partial(AdamW16, wd=0.3)],
                         ids="AdamW16 Adam16 Lamb16 RMSProp16 RMSProp16-mom AdamW16-wd".split())
def test_what_a_pickle_holds_takes_the_same_steps(opt_func):
    "And is made of fastai's own"
    data = pickle.dumps(opt_func)
    def run(f):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(3,4))
        opt = f([p], lr=0.1)
        for _ in range(5):
            p.grad = torch.randn_like(p)
            opt.step()
        return p.detach()
    assert b'fastai_amp16' not in data
    torch.testing.assert_close(run(opt_func), run(pickle.loads(data)), rtol=1e-5, atol=1e-6)

@pytest.mark.parametrize('opt_func', [AdamW16, Adam16, RAdam16, Lamb16, QHAdam16, Larc16, ranger16, RMSProp16])
def test_pytorchs_names_of_arguments_are_translated(opt_func):
    ps = [nn.Parameter(torch.ones(2))]
    says = r'takes no betas, weight_decay: its arguments are .*lr.*`betas` are `mom=` and `sqr_mom=`.*`wd=`'
    torchs = dict(betas=(.9,.99)),dict(weight_decay=.01)
    for f,kwargs in ((opt_func, merge(*torchs)), (partial(opt_func, **torchs[0]), torchs[1])):
        with pytest.raises(TypeError, match=says): f(ps, lr=1e-3, **kwargs)
    opt_func(ps, lr=1e-3, wd=0.1, eps=1e-5)
