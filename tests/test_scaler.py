"The policy of `DynamicScaler`, by properties and beside torch's own"
import math,pickle
import pytest,torch
from hypothesis import given,strategies as st
from torch.amp import GradScaler
from fastai_amp16.scaler import DynamicScaler

powers = st.integers(-14, 24).map(lambda n: 2.**n)
overflows = st.lists(st.tuples(st.booleans(), st.integers(1,25)), max_size=15).map(lambda runs: [o for o,n in runs for _ in range(n)])

@st.composite
def scalers(draw):
    "Any scaler that is possible"
    lo,init,hi = sorted(draw(st.lists(st.floats(2.**-126, 2.**120), min_size=3, max_size=3)))
    return DynamicScaler('cpu', init, min_scale=lo, max_scale=draw(st.sampled_from([hi, math.inf])), growth_factor=draw(st.floats(1.01, 1e30)),
                         backoff_factor=draw(st.floats(1e-30, 0.99)), growth_interval=draw(st.integers(1,8)), hysteresis=draw(st.integers(1,5)))

@given(scalers(), overflows)
def test_stays_within_bounds(s, overflows):
    for o in overflows:
        s.update(found_inf=o)
        assert s.min_scale<=s.get_scale()<=s.max_scale and math.isfinite(s.get_scale())
        assert math.isfinite(torch.tensor(s.get_scale()).reciprocal().item())

@given(scalers(), overflows)
def test_healthy_steps_change_nothing_before_the_interval(s, overflows):
    healthy = 0
    for o in overflows:
        before = s.get_scale()
        s.update(found_inf=o)
        healthy = 0 if o else healthy+1
        if not o and healthy<s.get_growth_interval(): assert s.get_scale()==before
        if not o and healthy==s.get_growth_interval():
            assert s.get_scale()>before or before*s.get_growth_factor()>min(s.max_scale, torch.finfo(torch.float32).max)
            healthy = 0

@given(scalers(), overflows)
def test_backs_off_when_hysteresis_is_used_up(s, overflows):
    left,healthy = s.hysteresis,0
    for o in overflows:
        before = s.get_scale()
        s.update(found_inf=o)
        if o:
            left,healthy = left-1,0
            assert s.get_scale()==before if left>0 else s.get_scale()<before or before==s.min_scale
        elif (healthy:=healthy+1)==s.get_growth_interval(): left,healthy = s.hysteresis,0

def steps(scaler, overflows):
    "Scale after each step of an ordinary loop whose gradients overflow or not; and the parameter"
    p = torch.nn.Parameter(torch.ones(1))
    opt = torch.optim.SGD([p], lr=0.1)
    res = []
    for o in overflows:
        loss = scaler.scale(p.sum())
        loss.backward()
        if o: p.grad.fill_(math.inf)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        res.append(scaler.get_scale())
    return res,p.item()

@given(powers, st.floats(1.01, 8), st.floats(0.3, 0.99), st.integers(1,10), st.lists(st.booleans(), max_size=40))
def test_follows_torch_step_for_step(init, growth, backoff, interval, overflows):
    kw = dict(init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    assert steps(DynamicScaler('cpu', hysteresis=1, min_scale=2.**-126, max_scale=math.inf, **kw), overflows) == steps(GradScaler('cpu', **kw), overflows)

@given(overflows)
def test_static_never_changes(overflows):
    s = DynamicScaler('cpu', 512., dynamic=False)
    for o in overflows: s.update(found_inf=o)
    assert s.get_scale()==512

@given(scalers(), overflows, overflows)
def test_state_continues(s, before, after):
    for o in before: s.update(found_inf=o)
    copies = pickle.loads(pickle.dumps(s)),pickle.loads(pickle.dumps(s))
    copies[1].update(1.)
    copies[1]._tolerance = 99
    copies[1].load_state_dict(s.state_dict())
    for o in after:
        for c in (s,*copies): c.update(found_inf=o)
        assert s.state_dict()==copies[0].state_dict()==copies[1].state_dict()

def test_state_of_torch():
    t = GradScaler('cpu', init_scale=8., growth_interval=3)
    s = DynamicScaler('cpu')
    s.load_state_dict(t.state_dict())
    assert steps(s, [False]*7)==steps(t, [False]*7)
    t.load_state_dict(s.state_dict())
    assert t.get_scale()==s.get_scale()

@pytest.mark.parametrize('scale', [0., math.inf, math.nan, 2.**-100])
def test_loaded_scale_is_brought_within_bounds(scale):
    s = DynamicScaler('cpu')
    s.load_state_dict({**GradScaler('cpu').state_dict(), 'scale': scale})
    assert s.min_scale<=s.get_scale()<=s.max_scale
    s.update(scale)
    assert s.min_scale<=s.get_scale()<=s.max_scale

def test_static_and_disabled_load_nothing():
    other = DynamicScaler('cpu', 2.**10).state_dict()
    for s,scale in ((DynamicScaler('cpu', 512., dynamic=False), 512), (DynamicScaler('cpu', enabled=False), 1)):
        s.load_state_dict(other)
        assert s.get_scale()==scale
    assert DynamicScaler('cpu', enabled=False).state_dict()=={}

def test_disabled_passes_on():
    x = torch.ones(2, requires_grad=True)
    s = DynamicScaler('cpu', enabled=False)
    assert s.scale(x) is x
    assert steps(s, [False, False])[1]==pytest.approx(0.8)

def test_the_device_has_the_scale_of_the_host():
    s = DynamicScaler('cpu', growth_interval=2)
    one = torch.ones(())
    for o in [False,False,True,True,False]:
        assert s.scale(one).item()==s.get_scale()
        s.update(found_inf=o)
    s.update(torch.tensor(4.))
    assert s.scale(one).item()==s.get_scale()==4

def test_overflow_of_one_optimizer_of_two_backs_off():
    ps = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    opts = [torch.optim.SGD([p], lr=0.1) for p in ps]
    s = DynamicScaler('cpu')
    s.scale(ps[0].sum()+ps[1].sum()).backward()
    ps[0].grad.fill_(math.nan)
    for opt in opts: s.step(opt)
    s.update()
    assert [p.item() for p in ps]==[1., pytest.approx(0.9)] and s.get_scale()==2**15

def test_grows_on_after_the_climb():
    s,free = [DynamicScaler('cpu', growth_interval=40) for _ in range(2)]
    for o in [True]*200+[False]*200:
        s.update(found_inf=o)
        if not o: s.climb()
    for _ in range(200): free.update(found_inf=False)
    assert s.get_scale()==free.get_scale()>2**16

def test_update_before_anything():
    with pytest.raises(RuntimeError, match='step()'): DynamicScaler('cpu').update()

@pytest.mark.parametrize('kw', [dict(init_scale=0), dict(init_scale=-1.), dict(init_scale=math.inf), dict(init_scale=math.nan), dict(init_scale='big'),
    dict(init_scale=2.**30), dict(init_scale=2.**-20), dict(min_scale=0), dict(min_scale=-1), dict(min_scale=2.**-130), dict(min_scale=4., max_scale=2.),
    dict(max_scale=0), dict(growth_factor=1), dict(growth_factor=math.inf), dict(backoff_factor=1), dict(backoff_factor=0), dict(backoff_factor=-1),
    dict(growth_interval=0), dict(growth_interval=2.5), dict(hysteresis=0), dict(hysteresis=None)])
def test_bad_input(kw):
    with pytest.raises(ValueError) as e: DynamicScaler('cpu', **kw)
    msg = str(e.value)
    assert any(f'{k}={v!r}' in msg for k,v in kw.items()) and msg.count('.\n')==0 and 'must be' in msg
