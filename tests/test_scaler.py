"The policy of `DynamicScaler`, by properties and beside torch's own"
import math,pickle
import pytest,torch
from hypothesis import given,settings,strategies as st
from torch.amp import GradScaler
from fastai_amp16.train.scaler import DynamicScaler

powers = st.integers(-14, 24).map(lambda n: 2.**n)
overflows = st.lists(st.tuples(st.booleans(), st.integers(1,25)), max_size=15).map(lambda runs: [o for o,n in runs for _ in range(n)])

@st.composite
def scalers(draw):
    "Any scaler that is possible"
    lo,init,hi = sorted(draw(st.lists(st.floats(2.**-126, 2.**120), min_size=3, max_size=3)))
    hi,growth,backoff = draw(st.sampled_from([hi, math.inf])),draw(st.floats(1.01, 1e30)),draw(st.floats(1e-30, 0.99))
    interval,hysteresis = draw(st.integers(1,8)),draw(st.integers(1,5))
    return DynamicScaler('cpu', init, growth, backoff, interval, hysteresis, min_scale=lo, max_scale=hi)

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

@settings(max_examples=40)
@given(powers, st.floats(1.01, 8), st.floats(0.3, 0.99), st.integers(1,10), st.lists(st.booleans(), max_size=40))
def test_follows_torch_step_for_step(init, growth, backoff, interval, overflows):
    kw = dict(init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    ours = DynamicScaler('cpu', hysteresis=1, min_scale=2.**-126, max_scale=math.inf, **kw)
    assert steps(ours, overflows)==steps(GradScaler('cpu', **kw), overflows)

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

@pytest.mark.parametrize('scale', [0., math.inf, 2.**-100])
def test_loaded_scale_is_brought_within_bounds(scale):
    s = DynamicScaler('cpu')
    s.load_state_dict({**GradScaler('cpu').state_dict(), 'scale': scale})
    assert s.min_scale<=s.get_scale()<=s.max_scale
    s.update(scale)
    assert s.min_scale<=s.get_scale()<=s.max_scale

broken = {
    'scale': ('8', None, torch.tensor(8.), 8j, True, math.nan, -8.),
    'growth_factor': ('2', None, 1., math.inf, math.nan),
    'backoff_factor': ('2', None, 0., 1., math.nan),
    'growth_interval': ('2', None, 0, 2.5, math.inf, math.nan, True),
    '_growth_tracker': ('2', None, 2.5, math.nan),
    '_tolerance': ('2', None, 2.5, [1]),
    'proven': ('2', None, 1),
    '_target': ('2', -1., math.nan, [1]),
    '_calm': ('2', None, 2.5)}

@pytest.mark.parametrize('k,v', [(k,v) for k,vs in broken.items() for v in vs], ids=str)
def test_a_broken_state_is_refused_and_changes_nothing(k, v):
    s = DynamicScaler('cpu', init_scale=2.**10)
    s.took(2.**10)
    before,other = vars(s).copy(),DynamicScaler('cpu', init_scale=8.).state_dict()
    with pytest.raises(ValueError, match=rf'^DynamicScaler: {k}=.* is not valid; it must be [^\n]*\.$'): s.load_state_dict({**other, k:v})
    assert vars(s)==before
    s.load_state_dict(other)
    assert s.get_scale()==8

@pytest.mark.parametrize('state', [None, [], {}, 'a', 3], ids=str)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match='DynamicScaler: state_dict=.*enabled GradScaler'): DynamicScaler('cpu').load_state_dict(state)

@pytest.mark.parametrize('k', GradScaler('cpu').state_dict())
def test_a_state_without_an_entry_of_torchs_is_refused(k):
    state = DynamicScaler('cpu').state_dict()
    del state[k]
    with pytest.raises(ValueError, match=f'{k}=None'): DynamicScaler('cpu').load_state_dict(state)

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

def tensors_of(o, times=1.):
    if isinstance(o, float): return torch.tensor(o*times)
    return type(o)([tensors_of(v, times) for v in o])

@pytest.mark.parametrize('o', [(1.,2.), [1.,(2.,[3.])], ()], ids=str)
def test_scales_containers_of_any_depth(o):
    scaled = DynamicScaler('cpu', 4.).scale(tensors_of(o))
    assert scaled==tensors_of(o, 4.) and type(scaled) is type(o)

def test_scales_iterators_and_refuses_what_is_no_tensor():
    "As torch's own"
    for s in (DynamicScaler('cpu', 4.), GradScaler('cpu', 4.)):
        assert [*s.scale(torch.tensor(o) for o in (1.,2.))]==[4.,8.]
        for bad in (1., [2.]):
            with pytest.raises(ValueError, match='must be a Tensor'): s.scale(bad)

def test_overflow_of_one_optimizer_of_two_backs_off():
    ps = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    opts = [torch.optim.SGD([p], lr=0.1) for p in ps]
    s = DynamicScaler('cpu')
    s.scale(ps[0].sum()+ps[1].sum()).backward()
    ps[0].grad.fill_(math.nan)
    for opt in opts: s.step(opt)
    s.update()
    assert [p.item() for p in ps]==[1., pytest.approx(0.9)] and s.get_scale()==2**15

halvings = st.lists(st.one_of(st.just(0), st.integers(0,20)), max_size=60) # by how much the present scale was too high, in each step

def take(s, n): s.took(max(s.min_scale, s.get_scale()/2.**n))

@given(scalers(), halvings)
def test_a_step_taken_at_some_scale_leaves_one_within_bounds(s, halvings):
    for n in halvings:
        take(s, n)
        assert s.min_scale<=s.get_scale()<=s.max_scale and math.isfinite(s.get_scale())

@given(scalers(), st.integers(0,40))
def test_steps_taken_at_the_present_scale_are_healthy_steps(s, n):
    other = pickle.loads(pickle.dumps(s))
    for _ in range(n):
        s.took(s.get_scale())
        other.update(found_inf=False)
        assert s.get_scale()==other.get_scale()

@given(scalers(), halvings, halvings)
def test_the_state_continues_wherever_it_was_saved(s, before, after):
    for n in before: take(s, n)
    loaded = pickle.loads(pickle.dumps(s))
    for n in (3,9,0): take(loaded, n)
    loaded.load_state_dict(s.state_dict())
    for n in after:
        for c in (s,loaded): take(c, n)
        assert s.state_dict()==loaded.state_dict()

@pytest.mark.parametrize('steps,scale,returns', [(0,2.**-4,False), (0,2.**15,False), (1,2.**15,False), (1,2.**14,True), (1,2.**-4,True)],
                         ids=['found in the first step','found, and near','one back-off','outlier','far outlier'])
def test_a_lower_scale_stays_unless_one_batch_forced_it_far_down(steps, scale, returns):
    s = DynamicScaler('cpu', growth_interval=10**6)
    for _ in range(steps): s.took(2.**16)
    s.took(scale)
    assert s.get_scale()==scale
    seen = []
    while len(seen)<400:
        s.took(s.get_scale())
        seen.append(s.get_scale())
    back = [min(scale*2.**((i+1)//8), 2.**16) for i in range(400)] # after some hundred steps, not ten thousand
    assert seen==(back if returns else [scale]*400)

def test_a_second_outlier_on_the_way_back_changes_nothing_but_the_way():
    s = DynamicScaler('cpu', growth_interval=10**6)
    for scale in (2.**16, 2.**4, *[2.**4]*8, 2.**1): s.took(scale)
    assert s.get_scale()==2
    for _ in range(8*15): s.took(s.get_scale())
    assert s.get_scale()==2.**16

def test_the_way_back_ends_where_the_gradients_overflow_again():
    s = DynamicScaler('cpu', growth_interval=10**6)
    for scale in (2.**16, 2.**4, *[2.**4]*8): s.took(scale)
    assert s.get_scale()==2.**5
    s.took(2.**4)
    for _ in range(100): s.took(s.get_scale())
    assert s.get_scale()==2.**4

def test_hysteresis_counts_batches_that_ran_at_a_lower_scale():
    s = DynamicScaler('cpu', hysteresis=3)
    s.took(2.**16)
    seen = []
    for _ in range(4):
        s.took(s.get_scale()/2)
        seen.append(s.get_scale())
        s.took(s.get_scale())
    assert seen==[2.**16, 2.**16, 2.**15, 2.**14]

def test_grows_on_after_the_way_back():
    s,free = [DynamicScaler('cpu', growth_interval=40) for _ in range(2)]
    for scale in (2.**16, 2.**4): s.took(scale)
    for _ in range(8*12+80): s.took(s.get_scale())
    for _ in range(80): free.took(free.get_scale())
    assert s.get_scale()==free.get_scale()==2.**18

@given(halvings)
def test_static_and_disabled_take_no_scale_over(halvings):
    for s,scale in ((DynamicScaler('cpu', 512., dynamic=False), 512), (DynamicScaler('cpu', enabled=False), 1)):
        for n in halvings: take(s, n)
        assert s.get_scale()==scale

def test_update_before_anything():
    with pytest.raises(RuntimeError, match='step()'): DynamicScaler('cpu').update()

def test_update_after_a_step_without_gradients():
    "A fused optimizer takes such a step, where another one is refused; PyTorch's scaler refuses the update as well"
    for scaler,error in ((GradScaler('cpu'),AssertionError), (DynamicScaler('cpu'),RuntimeError)):
        p = torch.nn.Parameter(torch.ones(2))
        scaler.scale(p.detach().sum())
        scaler.step(torch.optim.AdamW([p], fused=True))
        with pytest.raises(error): scaler.update()

bad = dict(init_scale=[0, -1., math.inf, math.nan, 'big', 2.**30, 2.**-30], min_scale=[0, -1, 2.**-130], max_scale=[0],
           growth_factor=[1, math.inf], backoff_factor=[1, 0, -1], growth_interval=[0, 2.5], hysteresis=[0, None])

@pytest.mark.parametrize('kw', [*({k:v} for k,vs in bad.items() for v in vs), dict(min_scale=4., max_scale=2.)], ids=str)
def test_bad_input(kw):
    with pytest.raises(ValueError) as e: DynamicScaler('cpu', **kw)
    msg = str(e.value)
    assert any(f'{k}={v!r}' in msg for k,v in kw.items()) and msg.count('.\n')==0 and 'must be' in msg
