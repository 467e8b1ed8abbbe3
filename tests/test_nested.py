"The walk over containers: what it finds, what it puts in its place, and what it leaves alone"
import copy
from collections import OrderedDict,UserDict,deque,namedtuple
from collections.abc import Mapping,MutableMapping
from dataclasses import dataclass
from types import SimpleNamespace
import pytest,torch
from torch import nn
from fastai.torch_core import TensorImage
from fastcore.foundation import L
from fastai_amp16.util.nested import cast_floats,replace,tensors

class Out(OrderedDict): pass
Pair = namedtuple('Pair', 'a b')

class Odd(tuple):
    "A constructor of its own"
    def __new__(cls, a, b): return super().__new__(cls, (a,b))

class Typed(list):
    def __init__(self, kind, *items):
        super().__init__(items)
        self.kind = kind

@dataclass(frozen=True)
class Frozen:
    a: object
    n: int = 1

@dataclass
class ModelOutput(OrderedDict):
    "Both a dict and a dataclass, as transformers' are"
    loss: object = None
    def __post_init__(self): self['loss'] = self.loss

class Lazy(MutableMapping):
    "Keeps what it has in an attribute"
    def __init__(self, **kwargs): self.d = kwargs
    def __getitem__(self, k): return self.d[k]
    def __setitem__(self, k, v): self.d[k] = v
    def __delitem__(self, k): del self.d[k]
    def __iter__(self): return iter(self.d)
    def __len__(self): return len(self.d)

class ReadOnly(Mapping):
    def __init__(self, a): self.d = {'a':a}
    def __getitem__(self, k): return self.d[k]
    def __iter__(self): return iter(self.d)
    def __len__(self): return 1

def t(): return torch.ones(2)

wraps = {'tensor':(lambda o: o, lambda o: o), 'tuple':(lambda o: (o,3), lambda o: o[0]), 'list':(lambda o: [3,o], lambda o: o[1]),
    'L':(lambda o: L(o), lambda o: o[0]), 'dict':(lambda o: {'a':o}, lambda o: o['a']),
    'subclass of dict':(lambda o: Out(a=o), lambda o: o['a']), 'UserDict':(lambda o: UserDict(a=o), lambda o: o['a']),
    'named tuple':(lambda o: Pair(None, o), lambda o: o.b), 'tuple of two':(lambda o: Odd(o, 1), lambda o: o[0]),
    'dataclass':(lambda o: Frozen(o), lambda o: o.a), 'model output':(lambda o: ModelOutput(o), lambda o: o['loss']),
    'mapping':(lambda o: Lazy(a=o), lambda o: o['a']),
    'read-only mapping':(lambda o: ReadOnly(o), lambda o: o['a']),
    'deep':(lambda o: {'a':[(Pair(1, Frozen(o)),)]}, lambda o: o['a'][0][0].b.a)}

@pytest.mark.parametrize('name', wraps)
def test_replaced_at_any_depth(name):
    "The container keeps its type, and the one that was given its tensors"
    wrap,get = wraps[name]
    old,new = t(),t()
    o = wrap(old)
    res = replace(o, lambda v: new)
    assert type(res) is type(o) and get(res) is new and get(o) is old
    assert [id(v) for v in tensors(o)]==[id(old)] and [id(v) for v in tensors(res)]==[id(new)]

def test_what_has_no_tensor_is_passed_on():
    "Classes, strings, arrays and objects included"
    for o in (None, 3, 'text', {1,2}, Frozen, int, object(), range(3), b'bytes'):
        assert replace(o, lambda v: 1/0) is o and tensors(o)==[]
    assert replace([], lambda v: 1/0)==[] and replace((), lambda v: 1/0)==()

def test_lists_with_a_constructor_of_their_own():
    res = replace(Typed('k', t(), 3), lambda v: 1)
    assert res==[1,3] and type(res) is Typed and res.kind=='k'

def test_sets():
    assert {o.dtype for o in cast_floats({t().half()})}=={torch.float32}

def test_what_torch_returns():
    "Its own tuples, and packed sequences"
    x = torch.randn(3,2)
    top = replace(x.max(0), lambda v: v*2)
    assert type(top) is type(x.max(0)) and torch.equal(top.values, x.max(0).values*2)
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(2,3,4).half(), [3,2], batch_first=True)
    assert cast_floats(packed).data.dtype==torch.float32 and torch.equal(cast_floats(packed).batch_sizes, packed.batch_sizes)

def test_tensors_are_those_with_a_floating_point():
    "In sets as well"
    a,b,c = t(),t().to(torch.complex64),t().half()
    assert {*map(id, tensors([a, torch.arange(3), {b}, {'k':(c,)}, torch.ones(2).bool()]))}=={id(a),id(b),id(c)}

def test_cast_floats_keeps_types():
    h = t().half()
    o = Out(a=[h,(h,3)], b=Pair(h,None), c=TensorImage(torch.ones(2)).half(), d=torch.arange(2), e=h.double(), f=L(h))
    r = cast_floats(o)
    assert type(r) is Out and type(r['b']) is Pair and type(r['c']) is TensorImage and type(r['f']) is L
    assert r['a'][0].dtype==r['a'][1][0].dtype==r['b'].a.dtype==r['c'].dtype==r['f'][0].dtype==torch.float32
    assert r['d'].dtype==torch.int64 and r['e'].dtype==torch.float64 and r['a'][1][1]==3 and o['a'][0].dtype==torch.float16

def test_cast_floats_casts_what_it_is_told_to():
    "Other dtypes are the same tensor; what hangs on a tensor comes along, and gradients go through"
    x = t().requires_grad_()
    x.orig = 'input of the block'
    assert cast_floats(x) is x and cast_floats([x], torch.float16)[0] is x
    h = cast_floats(x, torch.float16, (torch.float32,))
    assert h.dtype==torch.float16 and h.orig==x.orig
    cast_floats({'y':h})['y'].sum().backward()
    assert torch.equal(x.grad, torch.ones(2)) and x.grad.dtype==torch.float32
    assert cast_floats(copy.copy(deque([h])))[0] is h # no container that models give

class Simple:
    def __init__(self, a): self.a,self.more,self.name = [a],{'b':a.float()},'x'

@pytest.mark.parametrize('make,get', [(Simple, lambda o: o.a[0]), (lambda a: SimpleNamespace(a=(a,None)), lambda o: o.a[0]),
    (lambda a: torch.distributions.Normal(a, 1.), lambda o: o.loc)], ids=['object', 'namespace', 'distribution'])
def test_objects_are_looked_into_where_asked(make, get):
    "A copy of them: others may hold the object itself"
    t = torch.ones(3, dtype=torch.float16)
    o = make(t)
    assert cast_floats(o) is o and get(o) is t
    res = cast_floats(o, objects=1)
    assert type(res) is type(o) and get(res).dtype==torch.float32 and get(o) is t and cast_floats(res, objects=1) is res

def test_modules_functions_and_classes_are_left_alone():
    for o in (nn.Linear(2,2).half(), Simple, lambda: 3, len): assert cast_floats(o, objects=1) is o
