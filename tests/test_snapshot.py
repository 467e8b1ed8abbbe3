"What is restored before a batch runs again: statistics, hidden states, counters, random numbers, inputs"
import copy,gc,logging,math,random,threading,tracemalloc,weakref
from collections import Counter,OrderedDict,defaultdict,deque
from functools import partial
from types import SimpleNamespace
import numpy as np
import pytest,torch
from fastai.basics import Callback,L,Learner,nn
from fastai.callback.training import GradientAccumulation
from torch.autograd.profiler import profile
import fastai_amp16.learner # noqa: F401 (it gives `Learner` its methods)
from fastai_amp16.train.snapshot import LearnerState,ModelState,RandomStates
from common import Detour,Poison,equal,fit,learner,mlp,mse,plain_mlp,state


pytestmark = pytest.mark.filterwarnings('ignore::UserWarning')

class Loud(Callback):
    "Gradients at `steps` that fp16 holds at a lower loss scale only, and fp32 as they are"
    order = 5
    def __init__(self, *steps): self.steps = steps
    def before_fit(self): self.i = -1
    def before_batch(self): self.i += self.training
    def before_backward(self):
        if self.i in self.steps: self.learn.loss_grad = self.learn.loss_grad*2.**12

def beside(make, **kwargs):
    "What `make` gives in fp32, and in fp16, where batches ran again and none was skipped"
    a,b = fit(make(), 1),fit(make().to_fp16_dynamic(**kwargs), 1)
    assert b.mixed_precision.n_rerun and not b.mixed_precision.n_skipped
    return a,b

# --- values that change in place

def grown(o): o += ['more']*3
def popped(o):
    o.append('new')
    o.pop(0)
def inner(o):
    o['x'].append(3)
    o['y'].append(4)

containers = {
    'list':        (lambda: [1,2,3], lambda o: o.reverse()),
    'list of 100': (lambda: [0]*100, lambda o: o.__setitem__(7, 1)), # counts by class
    'window':      (lambda: list(range(100)), popped),
    'log':         (lambda: list(range(10**5)), grown),
    'L':           (lambda: L(1,2,3), lambda o: o.append(4)),
    'dict':        (lambda: dict(a=1), lambda o: o.update(a=2, b=3)),
    'dict, less':  (lambda: dict(a=1), lambda o: o.clear()),
    'ordered':     (lambda: OrderedDict(a=1, b=2), lambda o: o.move_to_end('a')),
    'Counter':     (lambda: Counter('hello'), lambda o: o.update('world')),
    'Counter of 3000': (lambda: Counter(range(3000)), lambda o: o.update(range(10))), # by sample
    'lists by name': (lambda: defaultdict(list, x=[1,2]), inner),
    'list of lists': (lambda: [[1],[2]], lambda o: o[0].append(3)),
    'set':         (lambda: {1,2}, lambda o: o.symmetric_difference_update({2,3})),
    'deque':       (lambda: deque([1,2,3], 3), lambda o: o.extend([4,5])),
    'array':       (lambda: np.zeros((10,10)), lambda o: np.add(o, 1, out=o)),
    'ints':        (lambda: np.arange(10), lambda o: o.__setitem__(3, 7))}

class Holds(nn.Linear):
    def __init__(self, o):
        super().__init__(2, 2)
        self.o = o

@pytest.mark.parametrize('name', containers)
def test_containers_are_restored_as_often_as_it_takes(name):
    "In place: others may have a reference to the same object; a log that only grows is cut"
    make,change = containers[name]
    o,expected = make(),make()
    state = ModelState(Holds(o), nn.MSELoss())
    for _ in range(4): restore = state.note()
    for _ in range(2):
        change(o)
        assert not np.array_equal(o, expected) if isinstance(o, np.ndarray) else o!=expected or list(o)!=list(expected)
        restore()
        assert state.model.o is o and type(o) is type(expected)
        assert np.array_equal(o, expected) if isinstance(o, np.ndarray) else o==expected and list(o)==list(expected)
    assert not isinstance(o, deque) or o.maxlen==3

generators = {
    'random.Random':(lambda: random.Random(1), lambda o: [o.gauss(0, 1) for _ in range(3)]), # it makes two Gaussians and keeps one
    'random_states':(lambda: np.random.RandomState(1), lambda o: o.randn(3).tolist()),
    'numpy':(lambda: np.random.default_rng(1), lambda o: o.normal(size=3).tolist()),
    'numpy, another':(lambda: np.random.Generator(np.random.MT19937(1)), lambda o: o.integers(0, 9, 3).tolist()),
    'torch':(lambda: torch.Generator().manual_seed(1), lambda o: torch.rand(3, generator=o, device='cpu').tolist())}

@pytest.mark.parametrize('name', generators)
def test_generators_of_ones_own_draw_the_same_again(name):
    make,draw = generators[name]
    o = make()
    draw(o)
    state = ModelState(Holds(o), nn.MSELoss())
    restore = state.note()
    first = draw(o)
    restore()
    assert state.model.o is o
    assert draw(o)==first and draw(o)!=first

def test_an_iterator_gives_the_same_items_again():
    "With the random numbers drawn for them; an item is forgotten when no note needs it"
    class Items:
        n = 0
        def __iter__(self): return self
        def __next__(self):
            self.n += 1
            if self.n>6: raise StopIteration
            return torch.rand(1)+self.n
    m = Holds(Items())
    state = ModelState(m, nn.MSELoss())
    restore = state.note()
    first = [next(m.o) for _ in range(2)]+[torch.rand(1)]
    for n in (1,2,2):
        restore()
        assert [next(m.o) for _ in range(n)]==first[:n] and (n==1 or torch.rand(1)==first[2])
    restore()
    state.end()
    assert type(m.o) is not Items and [int(o) for o in [next(m.o) for _ in range(2)]]==[1,2] # given again, without the wrapper
    restore()
    assert [int(next(m.o)) for _ in range(3)]==[1,2,3]
    state.end()
    assert type(m.o) is Items and m.o.n==3
    forgotten = weakref.ref(first.pop(0))
    restore = state.note()
    assert forgotten() is None

left_alone = {
    'logger': (logging.getLogger('any'), lambda o: o.setLevel(7), lambda o: o.level==7),
    'another object': (SimpleNamespace(n=0), lambda o: setattr(o, 'n', 7), lambda o: o.n==7),
    'large array': (np.zeros(10**6), lambda o: o.fill(7), lambda o: o.max()==7),
    'large dict': (dict.fromkeys(range(10**5)), lambda o: o.update(a=7), lambda o: o['a']==7),
    'list of a kind of its own': (type('Own', (list,), {})(), lambda o: o.append(7), lambda o: o==[7]),
    'old entries of a log': ([0]*10**5, lambda o: o.__setitem__(3, 7), lambda o: o[3]==7),
    'parameter': ([nn.Parameter(torch.zeros(1))], lambda o: o[0].data.fill_(7), lambda o: o[0].item()==7)}

@pytest.mark.parametrize('name', left_alone)
def test_anything_else_is_left_alone(name):
    o,change,has_changed = left_alone[name]
    state = ModelState(Holds(o), nn.MSELoss())
    restore = state.note()
    change(o)
    restore()
    assert has_changed(o) and state.model.o is o

class Meter:
    def __init__(self): self.log,self.by = [],{}

def test_logs_at_any_depth_are_exact():
    "In a dict of 192 lists of lists that grow, an object of a callback among them, while they are short and when they are long"
    class Cb(Callback): pass
    learn = learner(cbs=(cb := Cb()))
    cb.rows,cb.meter = {i: [[],{'n':[]}] for i in range(96)},Meter()
    logs = [o for a,b in cb.rows.values() for o in (a,b['n'])]
    states = LearnerState(learn),ModelState(Holds(cb.rows), nn.MSELoss())
    def grow(x):
        for o in (*logs, cb.meter.log): o.append(x)
    for n in (20,900): # short and long
        for i in range(n): grow(float(i))
        for o in states: o.note()
    for o in states:
        restore,*_ = L(o.note())
        expected = copy.deepcopy(cb.rows)
        grow(math.nan)
        cb.rows['new'],logs[3][-2] = 1,math.nan
        restore()
        assert cb.rows==expected and list(cb.rows)==list(expected)
    assert len(cb.meter.log)==len(logs[0])+1 # `ModelState` does not know it

# --- modules that do not run in each batch

class Counted(nn.Module):
    "Counts its calls, in an attribute, in a list and in a batch norm"
    def __init__(self):
        super().__init__()
        self.bn,self.n,self.all = nn.BatchNorm1d(16),0,[]
    def forward(self, x):
        self.n += 1
        self.all.append(self.n)
        return self.bn(x)

class Late(nn.Module):
    "A layer that runs from the batch `start` on, and one whose statistics other code uses"
    def __init__(self, start):
        super().__init__()
        self.inp,self.out,self.late,self.start,self.batch = nn.Linear(8,16),nn.Linear(16,1),Counted(),start,0
        self.never,self.used = nn.Sequential(Counted()),nn.BatchNorm1d(8)
    def forward(self, x):
        if self.training:
            nn.functional.batch_norm(x, self.used.running_mean, self.used.running_var, training=True)
            self.batch += 1
        x = self.inp(x)
        return self.out(self.late(x) if self.batch>self.start else x)

@pytest.mark.parametrize('start,loud', [(0,0), (0,2), (2,2), (5,5), (5,7)])
def test_a_module_that_runs_late_counts_each_batch_once(start, loud):
    "Whether it runs for the first time in an attempt or before; another one never runs"
    a,b = beside(lambda: learner(partial(Late, start), n=160, cbs=Loud(loud)))
    assert b.mixed_precision.history.reruns[loud]>0
    late = b.model.late
    assert (late.n,late.bn.num_batches_tracked)==(a.model.late.n,10-start) and late.all==[*range(1, late.n+1)]
    assert b.model.never[0].n==0
    torch.testing.assert_close(b.model.used.running_mean, a.model.used.running_mean)

def test_what_you_change_in_a_module_that_does_not_run_stays():
    class Change(Callback):
        "Between two steps, so that no attempt may undo it"
        def after_batch(self):
            if not self.training: return
            never = self.model.never[0]
            never.n,never.bn.momentum = self.train_iter,0.5
            never.all.append(self.train_iter)
    learn = fit(learner(partial(Late, 0), n=160, cbs=[Change(), Loud(6)]).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.history.reruns[6]>0
    assert learn.model.never[0].n==10 and learn.model.never[0].all==[*range(1, 11)]

# --- random numbers

draws = {
    'torch': lambda: torch.randn(3).tolist(), 'dropout': lambda: nn.functional.dropout(torch.ones(64)).tolist(), 'python': random.random,
    'gauss': lambda: random.gauss(0, 1), 'beta': lambda: np.random.beta(0.4, 0.4), 'one Gaussian': np.random.randn,
    'three Gaussians': lambda: np.random.randn(3).tolist(), 'permutation': lambda: np.random.permutation(9).tolist(),
    'byte': lambda: np.random.bytes(1), 'many': lambda: np.random.rand(2*624).tolist(),
    'seed': lambda: np.random.seed(3) or np.random.rand(), 'many of Python': lambda: [random.random() for _ in range(624)],
    'bits': lambda: random.getrandbits(5)}

def begun(name, began):
    "The function that draws, from generators with a seed, after `began` Gaussians of numpy and of Python"
    for lib in (torch.manual_seed, np.random.seed, random.seed): lib(0)
    for _ in range(began): np.random.randn(), random.gauss(0, 1)
    return draws[name]

@pytest.mark.parametrize('began', [0,1,2])
@pytest.mark.parametrize('name', draws)
def test_random_numbers_drawn_again_are_the_same(name, began):
    "Whatever was drawn before, also in a batch after one that draws nothing"
    draw,states = begun(name, began),RandomStates()
    for i in range(6):
        restore = states.note()
        if i not in (1,4):
            first = draw()
            for _ in range(2):
                if i==3: np.random.shuffle([*range(9)]) # what an attempt draws need not be what the next one draws
                restore()
                assert draw()==first
        states.end()

def test_batches_that_draw_late():
    "A batch that draws from Python's or numpy's generator for the first time draws the same again if it is noted, and those after it"
    states = RandomStates()
    for i in range(1, 12):
        restore = states.note()
        if i>=7:
            first = np.random.rand(),random.random(),torch.rand(1).item()
            restore()
            again = np.random.rand(),random.random(),torch.rand(1).item()
            assert again==first if i>7 else again[2]==first[2] # the eighth is looked at, the seventh is not
        states.end()

class Draws(nn.Module):
    "Notes what was drawn in each forward pass, as an object that is not put back"
    def __init__(self):
        super().__init__()
        self.m,self.drop,self.seen = mlp(),nn.Dropout(0.3),SimpleNamespace(rows=[])
    def forward(self, x):
        x = self.drop(x)
        self.seen.rows.append(((x==0).sum(1).tolist(), np.random.beta(0.4, 0.4), np.random.randn(3).tolist(), random.gauss(0, 1)))
        return self.m(x)

def test_the_run_that_counts_draws_what_fp32_draws():
    class Which(Callback):
        "Keeps the last run of each batch"
        order = 99
        def before_fit(self):
            self.kept = []
            np.random.randn() # one is kept
        def after_batch(self): self.kept.append(self.model.seen.rows[-1])
    a,b = beside(lambda: learner(Draws, n=160, cbs=[Loud(3,7), Which()]), init_scale=2.**24)
    assert a.which.kept==b.which.kept and len(b.model.seen.rows)>len(a.model.seen.rows)

# --- what modules and callbacks remember

def begin(o):
    "Give `o` all kinds of memory"
    o.n,o.hidden,o.late,o.pair,o.last = 0,torch.zeros(2),None,(torch.zeros(1),'text'),None
    o.mean,o.queue = torch.zeros(3),torch.zeros(2**17)
    o.wide,o.whole = torch.zeros(2, dtype=torch.complex64),torch.zeros((), dtype=torch.int64)
    o.list,o.log,o.counts,o.by_name,o.deque = [],[0]*3000,Counter(),defaultdict(list),deque(maxlen=3)
    o.tensors,o.slots,o.array,o.own,o.another = [torch.zeros(2)],{'m':torch.zeros(2)},np.zeros(4),random.Random(0),np.random.default_rng(0)

def remember(o, x):
    "Change all of it, in place or not"
    x = x.detach().float().mean(0)
    o.n += 1
    o.hidden,o.pair,o.last = o.hidden*0.5+x[:2],(o.pair[0]+1,'text'),float(x[0])
    for t in (o.mean,o.queue,o.wide,o.whole,o.tensors[0],o.slots['m']): t.add_(1)
    if o.n==6: o.late = torch.zeros(2) # nothing before
    if o.n>=6: o.late.add_(1)
    if o.n==7: o.new = [0]
    if o.n>=7: o.new[0] += 1
    o.list.append(o.n)
    o.log.append(o.n)
    o.deque.append(o.n)
    o.counts.update([o.n,'all'])
    o.by_name[o.n%2].append(o.n)
    o.array += 1
    o.list.append((o.own.random(),o.another.random()))

def told(o):
    "What `o` remembers, to be compared"
    keys = [k for k in vars(o) if k in {*vars(empty),'new'}]
    assert len(keys)==len(vars(empty))+1
    def plain(v):
        if isinstance(v, (tuple,list)): return [plain(o) for o in v]
        if isinstance(v, dict): return {k: plain(o) for k,o in v.items()}
        if hasattr(v, 'random'): return v.random()
        return v.tolist() if hasattr(v, 'tolist') else v
    return {k: plain(getattr(o, k)) for k in keys}

empty = SimpleNamespace()
begin(empty)

class Remembers(nn.Module):
    "Does so, and overflows in fp16 in validations"
    def __init__(self):
        super().__init__()
        self.m,self.detour = mlp(),Detour()
        begin(self)
    def forward(self, x):
        remember(self, x)
        self.detour.on = not self.training
        return self.detour(self.m(x))

class RememberingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        begin(self)
    def forward(self, p, t):
        remember(self, t.expand(-1,2))
        return mse(p, t)

class Remembering(Callback):
    def before_fit(self): begin(self)
    def after_pred(self): remember(self, self.x)

@pytest.mark.parametrize('acc', [None,48])
def test_each_batch_is_remembered_once(acc):
    "By the model, by a loss function and by a callback, as in fp32; in validations too, and where gradients of several are accumulated"
    def make():
        cbs = [Loud(3,6,7,9), Remembering(), *([GradientAccumulation(acc)] if acc else [])]
        return learner(Remembers, n=12*16, loss_func=RememberingLoss(), cbs=cbs, shuffle=False, lr=0.)
    a,b = beside(make, init_scale=2.**24)
    assert a.model.n==13 and b.mixed_precision.promoted==['detour']
    for x,y in zip((a.model,a.loss_func,a.remembering), (b.model,b.loss_func,b.remembering)): assert told(x)==told(y)
    for x,y in zip(a.model.m[1].buffers(), b.model.m[1].buffers()): torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)
    assert b.model.m[1].num_batches_tracked==12

@pytest.mark.parametrize('acc', [None,32])
def test_a_skipped_step_is_remembered_by_the_learner_only(acc):
    "The batches of a step that fp32 could not take either: the model's side is as before, a callback has seen them"
    class Trains(Remembers):
        def forward(self, x): return super().forward(x) if self.training else self.m(x)
    learn = learner(Trains, n=6*16, cbs=[Poison({3}, 'backward'), Remembering(), *([GradientAccumulation(acc)] if acc else [])])
    fit(learn.to_fp16_dynamic(), 1)
    left,m = 4 if acc else 5,learn.model
    assert learn.mixed_precision.n_skipped==1 and learn.remembering.n==7 and len(learn.remembering.list)==14
    assert left==m.n==m.m[1].num_batches_tracked==m.mean[0]==m.queue[0]==m.slots['m'][0]==m.array[0]==m.counts['all']
    assert len(m.log)==3000+left and len(m.list)==2*left

def test_the_loss_function_may_be_a_method_of_a_callback():
    "As MixUp's is: what the callback counts stays its own, also where a step is skipped"
    class Method(Callback):
        order = 5
        def before_fit(self): self.n,self.batches,self.own,self.learn.loss_func = 0,0,self.learn.loss_func,self.lf
        def after_fit(self): self.learn.loss_func = self.own
        def before_batch(self): self.batches += self.training
        def lf(self, p, t):
            self.n += self.training
            return self.own(p, t)
    learn = fit(learner(cbs=[Method(), Loud(1), Poison({3}, 'backward'), GradientAccumulation(32)]).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.n_skipped==1 and learn.mixed_precision.n_rerun>1 and learn.method.n==learn.method.batches==4

def test_an_attribute_that_an_attempt_has_added_is_gone_again():
    learn = learner(plain_mlp).to_fp16_dynamic()
    states = LearnerState(learn),ModelState(learn.model, nn.MSELoss())
    (restore,_),modules_back = [o.note() for o in states]
    learn.new = learn.model.new = 1
    restore(), modules_back()
    assert not hasattr(learn, 'new') and not hasattr(learn.model, 'new')

class Shadowing(Callback):
    "Has attributes of its own by names that mean something else in a learner"
    def before_fit(self): vars(self).update(loss=0, pred=0, xb=0, dl=0, scaler=0)
    def after_pred(self): vars(self).update({k: vars(self)[k]+1 for k in ('loss','pred','xb','dl','scaler')})

def test_a_callbacks_attributes_are_its_own_whatever_their_names():
    learn = fit(learner(cbs=[Loud(1,3), Shadowing()]).to_fp16_dynamic(), 1)
    assert learn.mixed_precision.n_rerun>1 and {vars(learn.shadowing)[k] for k in ('loss','pred','xb','dl','scaler')}=={5}

def test_modes_are_restored():
    "A learner's own method that evaluates, and trains a part only, when an attempt is left"
    class Own(Learner):
        def _do_one_batch(self):
            m,weight = self.model,self.model[0].weight
            if self.training: seen.append((m.training, m[1].training, weight.requires_grad))
            self.pred = m(*self.xb)
            self('after_pred')
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.clone()
            self('after_loss')
            if not self.training: return
            m.eval(), weight.requires_grad_(False)
            self._do_grad_opt()
            m.train(), weight.requires_grad_(True)
    seen = []
    learn = learner(cbs=Loud(1))
    learn.__class__ = Own
    fit(learn.to_fp16_dynamic(init_scale=2.**24), 1)
    assert len(seen)>6 and set(seen)=={(True,True,True)} and learn.model[1].num_batches_tracked==4

# --- tensors of all kinds

class Odd(nn.Linear):
    "Tensors that cannot be written to, and others"
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer('expanded', torch.ones(1).expand(8))
        with torch.inference_mode(): self.table = torch.arange(4.)
        self.empty,self.sparse,self.half = torch.zeros(0),torch.eye(3).to_sparse(),torch.ones(2).half()
        self.strided,self.h,self.queue = torch.zeros(4,6)[:,::2],torch.zeros(3),torch.zeros(2**17)
        self.leaf = torch.zeros(2, requires_grad=True)
        self.view = self.h[:2]

def change(m, size):
    with torch.no_grad():
        for t in (m.half,m.strided,m.leaf): t.add_(1)
    m.sparse = m.sparse*2
    m.h.data,m.queue.data = torch.ones(size),torch.ones(2**17+size)

def values(m):
    ts = {k: t.detach() for k,t in (*vars(m).items(),*m._buffers.items()) if isinstance(t, torch.Tensor)}
    return {k: t.to_dense() if t.is_sparse else t.clone() for k,t in ts.items()}

def test_tensors_of_all_kinds():
    "Also such as change their size, from step to step or within one"
    m = Odd()
    state,ids = ModelState(m, nn.MSELoss()),[id(m.h),id(m.queue),id(m.leaf)]
    for size in (3,5,2,2):
        before,restore = values(m),state.note()
        for _ in range(2):
            change(m, size+1)
            restore()
            assert values(m).keys()==before.keys() and all(torch.equal(v, before[k]) for k,v in values(m).items())
        change(m, size)
    assert ids==[id(m.h),id(m.queue),id(m.leaf)]

def test_a_storage_that_is_replaced_twice():
    "It may get the address of the first one, so nothing seems to have changed"
    m = Holds(None)
    m.queue = torch.zeros(2**17)
    state = ModelState(m, nn.MSELoss())
    restore = state.note()
    for _ in range(20):
        for n in (2**17+1, 2**17): m.queue.data = torch.ones(n)
        restore()
        assert not m.queue.any() and len(m.queue)==2**17

def test_a_small_tensor_that_gets_other_data():
    m = Holds(torch.zeros(3))
    state = ModelState(m, nn.MSELoss())
    state.note()
    m.o.data = torch.ones(3)
    restore = state.note()
    m.o.add_(1)
    restore()
    assert m.o.tolist()==[1,1,1]

def test_buffers_are_restored_in_place():
    "Statistics of norms, with or without parameters"
    net = nn.Sequential(nn.Linear(4,4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4, track_running_stats=False))
    state = ModelState(net, mse)
    net(torch.randn(6,4))
    before,ids = copy.deepcopy(net.state_dict()),[*map(id, net.buffers())]
    restore = state.note()
    net(torch.full((6,4), math.inf))
    assert net[1].running_mean.isnan().any()
    restore()
    assert all(torch.equal(v, before[k]) for k,v in net.state_dict().items()) and ids==[*map(id, net.buffers())]

@pytest.mark.parametrize('how', ['in place','state'])
def test_a_momentum_encoder_is_restored(how):
    "Frozen, and written in the forward pass, as MoCo's: from the second step on, when such a write has been seen"
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fast,self.slow = plain_mlp(),plain_mlp().requires_grad_(False)
        @torch.no_grad()
        def follow(self):
            for a,b in zip(self.fast.parameters(), self.slow.parameters()):
                if how=='in place': b.mul_(0.5).add_(a, alpha=0.5)
            if how=='state': self.slow.load_state_dict(self.fast.state_dict())
        def forward(self, x):
            if self.training: self.follow()
            return self.fast(x)+0.1*self.slow(x)
    class Before(Callback):
        def before_batch(self): self.state = state(self.learn) if self.training else self.state
    a,b = beside(lambda: learner(Momentum, cbs=Loud(1,5), n=128))
    for x,y in zip(state(a).values(), state(b).values()): torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)
    skipped = learner(Momentum, n=32, cbs=[Poison({1}, 'backward'), Before()])
    fit(skipped.to_fp16_dynamic(), 1)
    before = skipped.before.state
    assert skipped.mixed_precision.n_skipped==1 and equal(before, state(skipped))

# --- inputs

class Writes(nn.Module):
    "Writes to its input, from its `first` forward pass on"
    first = 0
    def __init__(self):
        super().__init__()
        self.m,self.n = plain_mlp(),0
    def forward(self, x):
        self.n += 1
        if self.n>self.first: x.mul_(0.5).add_(1)
        return self.m(x)

def writing_loss(p, t):
    loss = mse(p, t.clone()) # what autograd keeps must not be written to
    t.sub_(1)
    return loss

def test_inputs_and_targets_that_are_written_to():
    a,b = beside(lambda: learner(Writes, n=128, loss_func=writing_loss, cbs=Loud(0,5), shuffle=False), init_scale=2.**24)
    torch.testing.assert_close(torch.stack(a.recorder.losses), torch.stack(b.recorder.losses), rtol=1e-2, atol=1e-4)
    for x,y in zip(state(a).values(), state(b).values()): torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-3)

def test_the_first_write_to_an_input_is_not_expected():
    "There is no copy of it. The batch is skipped, if it overflows at all, and said to be; the next one runs again"
    class Later(Writes): first = 4
    learn = learner(Later, n=128, cbs=Loud(4,6), shuffle=False).to_fp16_dynamic()
    with pytest.warns(UserWarning, match='could not run again'): fit(learn, 1)
    h = learn.mixed_precision.history
    assert h.skipped.tolist()==[i==4 for i in range(8)] and h.reruns[6]>0

# --- what is not touched

def test_another_threads_change_of_a_logger_survives():
    "And any other object with more than numbers that a callback refers to: in batches that run again, are looked into, or skipped"
    log,foreign = logging.getLogger('amp16.test'),SimpleNamespace(n=0, rows=[], lock=threading.Lock())
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.m,self.log,self.foreign,self.handlers = mlp(),log,foreign,log.handlers
        def forward(self, x): return self.m(x)
    class Other(Callback):
        order = 20
        def before_fit(self): self.log,self.foreign = log,foreign
        def after_pred(self):
            def change():
                foreign.n += 1
                foreign.rows.append(foreign.n)
                log.setLevel(foreign.n)
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()
        def after_batch(self): assert log.level==foreign.n==len(foreign.rows)
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = log
        def forward(self, p, t): return mse(p, t)
    learn = fit(learner(Logs, cbs=[Other(), Loud(2), Poison({5}, 'forward')], loss_func=Loss(), n=128).to_fp16_dynamic(), 1)
    n,mp = foreign.n,learn.mixed_precision
    assert n>9+mp.n_rerun and mp.n_skipped==1
    learn.diagnose_fp16()
    assert log.level==foreign.n==len(foreign.rows)>n

def allocated(f):
    "Bytes that torch and Python allocate at most while `f` runs"
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with profile(profile_memory=True) as prof: f()
    top = tracemalloc.get_traced_memory()[1]-before
    tracemalloc.stop()
    return sum(max(0, e.self_cpu_memory_usage) for e in prof.function_events),top

class Heavy(nn.Module):
    "Four megabytes of each kind, with a number of elements that nothing else has"
    n = 2**20+7
    def __init__(self):
        super().__init__()
        self.m,self.trained,self.frozen = mlp(),nn.Parameter(torch.zeros(self.n)),nn.Parameter(torch.zeros(self.n), requires_grad=False)
        self.register_buffer('buffer', torch.zeros(self.n))
        self.plain,self.listed,self.named = torch.zeros(self.n),[torch.zeros(self.n)],{'t':torch.zeros(self.n)}
        self.array,self.log = np.zeros(self.n),[0]*self.n
    def forward(self, x): return self.m(x)

def test_arrays_and_parameters_are_not_copied():
    "Neither are logs; other tensors once, and again when they change"
    state = ModelState(Heavy(), nn.MSELoss())
    first,pythons = allocated(state.note)
    assert first<=4.1*4*Heavy.n and pythons<10**6 # a buffer, an attribute, and entries of a list and a dict
    rows = [allocated(state.note) for _ in range(3)]+[allocated(lambda: deque((state.note() for _ in range(300)), 0))]
    assert max(torchs for torchs,_ in rows)<300*1000 and max(pythons for _,pythons in rows)<10**6

def test_a_long_list_is_not_looked_through():
    class Item:
        asked = 0
        @property
        def __class__(self): # `isinstance` asks for it
            Item.asked += 1
            return Item
    m = Holds(None)
    m.vocab,m.index = [Item() for _ in range(10**4)],{i: Item() for i in range(10**4)}
    state = ModelState(m, nn.MSELoss())
    for _ in range(4): state.note()
    Item.asked = 0
    for _ in range(4): state.note()
    assert Item.asked==0

# --- graphs

kinds = {'a tensor': (lambda y: y, lambda o: o), 'tuple': (lambda y: (y,3), lambda o: o[0]), 'list': (lambda y: [y], lambda o: o[0]),
         'dict': (lambda y: {'y':y}, lambda o: o['y']), 'deque': (lambda y: deque([y]), lambda o: o[0])}

class Keeps(nn.Module):
    "Gives predictions, and remembers features, in containers"
    def __init__(self, preds, features):
        super().__init__()
        self.m,self.preds,self.features = mlp(),preds,features
    def forward(self, x):
        h = self.m[:3](x)
        self.kept = self.features(h)
        return self.preds(self.m[3](h))

@pytest.mark.parametrize('kind', [*kinds,'list of dicts'])
def test_no_graph_lives_on(kind):
    """That of a batch is gone when the backward pass of the next one has run, without a collection of garbage, as in fp32

    Neither predictions keep it, nor what a module or a callback remembers; of an attempt that was left nothing is kept either."""
    wrap,get = kinds.get(kind, kinds['tuple'])
    preds,pred_of = (lambda y: [{'y':y}],lambda o: o[0]['y']) if kind=='list of dicts' else kinds['tuple'] if kind=='deque' else (wrap,get)
    refs,alive = [],[]
    class See(Callback):
        order = 20
        def after_loss(self):
            pred = pred_of(self.pred)
            self.kept = wrap(pred*1)
            refs.append([weakref.ref(o) for o in (pred, get(self.model.kept), get(self.kept))])
        def after_backward(self): alive.append([any(r() is not None for r in rs) for rs in zip(*refs[:-1])])
    learn = learner(Keeps(preds, wrap), loss_func=lambda p,t: mse(pred_of(p), t), cbs=[See(), Loud(2)])
    gc.collect()
    gc.disable()
    try: fit(learn.to_fp16_dynamic(), 1)
    finally: gc.enable()
    assert len(refs)>len(alive)>=4 and not sum(map(sum, alive)), alive

# --- what becomes infinite

class Carries(nn.Module):
    "Activations up to some 1e5, and something that remembers them"
    by = 5e4
    def __init__(self):
        super().__init__()
        self.inp,self.out = nn.Linear(8,16),nn.Linear(16,1)
    def forward(self, x): return self.out(self.carry(self.inp(x)*self.by)/self.by)

class Plain(Carries):
    def carry(self, h): return h

class Centred(Carries):
    def __init__(self):
        super().__init__()
        self.register_buffer('mu', torch.zeros(16))
    def carry(self, h):
        if self.training: self.mu.lerp_(h.detach().mean(0).float(), 0.1)
        return h-self.mu

class Hidden(Carries):
    h = None
    def carry(self, h):
        self.h = h.detach().mean(0)*0.5+(0 if self.h is None else self.h*0.5)
        return h+0.1*self.h

class Listed(Carries):
    def __init__(self):
        super().__init__()
        self.last = []
    def carry(self, h):
        self.last[:] = [*self.last[-2:], h.detach().mean(0)]
        return h+0.1*sum(self.last)

class Scaled(Carries):
    "A number of Python's; the quotient is 0 where it is inf, and no loss tells"
    by,top = 1e4,1.
    def carry(self, h):
        if self.training: self.top = 0.9*self.top+0.1*(8*h).detach().abs().max().item()
        return h/self.top*8*self.by

class RunningVar(nn.Module):
    "A batch norm by hand: in training it divides by the batch's deviation, in validation by the running one"
    def __init__(self):
        super().__init__()
        self.register_buffer('var', torch.ones(16))
    def forward(self, h):
        var = h.var(0) if self.training else self.var
        if self.training: self.var.lerp_(var.detach().float(), 0.1)
        return (h-h.mean(0))/(var+1e-5).sqrt()

class Normed(Carries):
    by = 1.
    def __init__(self):
        super().__init__()
        self.carry = RunningVar()
    def forward(self, x): return super().forward(3e3*x)

class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(1))
    def forward(self, p, t):
        self.mean.lerp_((p-t).detach().mean(0), 0.1)
        return mse(p-0.1*self.mean, t)

class UsedLater(Carries):
    "What overflows goes into the next batch only"
    by = 300.
    def __init__(self):
        super().__init__()
        self.register_buffer('ms', torch.ones(16))
    def carry(self, h):
        res = h-1e-4*self.ms
        if self.training: self.ms.lerp_((h.detach()*h.detach()).mean(0).float(), 0.1)
        return res

class FloatLater(Carries):
    "The same with a number of Python's"
    by,ms = 300.,1.
    def carry(self, h):
        res = h-1e-4*self.ms
        if self.training: self.ms = 0.9*self.ms+0.1*(h.detach()*h.detach()).max().item()
        return res

class Losses(Callback):
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append(self.loss.item())

left = {UsedLater:'ms', FloatLater:'ms'} # the loss is finite, and that is not: a comparison with fp32 shows it

@pytest.mark.parametrize('model,loss', [(Centred,None), (Hidden,None), (Listed,None), (Scaled,None), (Normed,None), (Plain,CentreLoss),
                                        (UsedLater,None), (FloatLater,None)])
def test_what_is_carried_stays_finite(model, loss):
    "The cause is found in the first batch, and all batches have the losses that they have in fp32"
    def run(to): return fit(to(learner(model, n=15*16, loss_func=loss and loss(), scale=3., cbs=Losses())), 1)
    a,b = run(Learner.to_fp32),run(Learner.to_fp16_dynamic)
    mp = b.mixed_precision
    assert mp.promoted and mp.history.reruns[0] and not mp.n_skipped and len(mp.history)==15
    assert mp.reports[0].verdict=='forward' and (model not in left or f'goes to the next batch: `{left[model]}`.' in mp.reports[0].sentence)
    fp32,fp16 = a.losses.seen,b.losses.seen
    assert fp16==pytest.approx(fp32, rel=3e-2) and fp16[-1]==pytest.approx(fp32[-1], rel=1e-2)
    assert all(v.isfinite().all() for v in state(b).values())

def test_an_infinity_that_is_meant():
    "fp32 has it as well: after the first step nobody asks any more"
    class Best(Carries):
        by = 1.
        def __init__(self):
            super().__init__()
            self.register_buffer('log_p', torch.zeros(16))
            self.register_buffer('low', torch.full((16,), math.inf)) # half of it stays so
        def carry(self, h):
            if self.training:
                self.low[:8] = self.low[:8].minimum(h.detach().amin(0).float()[:8])
                self.log_p.copy_((h.detach()>0).float().mean(0).log()-math.inf)
            return h
    learn = fit(learner(Best).to_fp16_dynamic())
    mp = learn.mixed_precision
    assert mp.reports==mp.promoted==[] and not mp.n_skipped and not mp.history.reruns[1:].any() and mp.history.reruns[0]<=2
    assert learn.model.log_p.isinf().all() and learn.model.low[8:].isinf().all()

def test_an_infinity_that_stays_as_it_is_costs_nothing():
    "A mask of attention is infinite from the start"
    class Masked(Plain):
        by = 1.
        def __init__(self):
            super().__init__()
            self.register_buffer('mask', torch.full((16,16), -math.inf).triu(1))
            self.worst = -math.inf
    mp = fit(learner(Masked).to_fp16_dynamic()).mixed_precision
    assert not mp.reports and not mp.n_rerun and not mp.history.reruns.any()

def test_warn_tells_once_and_goes_on():
    learn = learner(UsedLater).to_fp16_dynamic(on_spiral='warn')
    with pytest.warns(UserWarning, match='goes to the next batch: `ms`') as w: fit(learn, 1)
    assert learn.mixed_precision.promoted==[] and sum('goes to the next batch: `ms`' in str(o.message) for o in w)==1

class Recurrent(nn.Module):
    "Goes on with its hidden state, which is in half precision where half precision made it"
    def __init__(self):
        super().__init__()
        self.cell,self.again,self.out,self.hidden,self.on = nn.Linear(8,8),nn.Linear(8,8),nn.Linear(8,1),None,False
    def forward(self, x):
        x = self.cell(x)
        if self.hidden is not None: x = x+self.again(self.hidden)
        self.hidden = x.detach()
        if self.on and x.dtype!=torch.float32: raise ValueError('no half precision here')
        return self.out(x)

def test_buffers_of_half_parts_stay_in_half_precision():
    "Others become fp32 where half precision has made them"
    class WithBuffer(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer('shift', torch.ones(2).half())
    m = nn.Sequential(WithBuffer().half(), WithBuffer())
    ModelState(m, nn.MSELoss()).to_fp32()
    assert [o.shift.dtype for o in m]==[torch.float16,torch.float32]

def test_a_hidden_state_of_half_precision_goes_on_in_fp32():
    class On(Callback):
        def before_batch(self): self.model.on = self.iter==2
    learn = fit(learner(Recurrent, cbs=On()).to_bf16_dynamic(), 1)
    mp = learn.mixed_precision
    assert mp.reports[0].verdict=='forward' and len(mp.history)==4 and not mp.n_skipped
