"Gradients as lists, beside plain PyTorch"
import math
import pytest,torch
from fastai.basics import Optimizer,nn
from torch.utils._python_dispatch import TorchDispatchMode
from fastai_amp16.train.grads import grad_params,grad_values,read_all,scale_grads,total_norm

def params(*dtypes):
    ps = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    for i,p in enumerate(ps): p.grad = torch.full_like(p, i+1)
    return ps

def test_each_parameter_with_a_gradient_once():
    "Also where it is in two groups, and in the order of the groups"
    a,b,c = params(*[torch.float32]*3)
    c.grad = None
    assert [*map(id, grad_params(Optimizer([[b,a],[c,b]], cbs=[])))]==[id(b),id(a)]

@pytest.mark.parametrize('dtypes', [(torch.float32,)*3, (torch.float32,torch.float64),
                                    (torch.complex64,torch.float32), (torch.float16,torch.float32)])
@pytest.mark.parametrize('factor', [0.5, 2.**-16, 1/3, math.inf])
def test_scaled_in_place_as_a_loop_does(dtypes, factor):
    ps,ref = params(*dtypes),params(*dtypes)
    held = [p.grad for p in ps]
    scale_grads(grad_values(ps), factor)
    for p,q,g in zip(ps, ref, held):
        assert p.grad is g and p.grad.dtype==q.dtype and torch.equal(g, q.grad.mul_(factor)) or math.isinf(factor) and g.is_complex()

def test_sparse_gradients_are_read_and_scaled_by_their_values():
    "Rows that came twice are added up first: a norm of the parts is not the norm of the sum"
    emb,dense = nn.Embedding(5, 2, sparse=True),params(torch.float32)[0]
    (emb(torch.tensor([1,1,3]))*torch.tensor([[1.],[2.],[4.]])).sum().backward()
    values = grad_values([dense, emb.weight])
    assert torch.equal(values[1], torch.tensor([[3.,3.],[4.,4.]])) and values[0] is dense.grad
    scale_grads([dense.grad, emb.weight.grad], 0.5)
    assert torch.equal(emb.weight.grad.to_dense()[[1,3]], torch.tensor([[1.5,1.5],[2.,2.]])) and emb.weight.grad.is_sparse
    assert len(emb.weight.grad._values())==3 # an optimizer may add them up in another order

def sparse(): return torch.sparse_coo_tensor([[1,1,3]], torch.tensor([1.,2.,3.]), (5,), check_invariants=True)

@pytest.mark.parametrize('grads', [[torch.ones(3)], [torch.ones(3), torch.ones(2, 2, dtype=torch.float64)], [sparse(), torch.ones(3)],
                                   [torch.ones(3), sparse()], [torch.ones(2**18), torch.ones(3)], [torch.ones(2**18), sparse()]])
def test_norm_is_that_of_all_numbers(grads):
    "In any layout, few or many: a sparse gradient counts what it adds up to"
    ref = torch.cat([g.to_dense().double().flatten() for g in grads]).norm()
    assert total_norm(grads).item()==pytest.approx(ref.item(), rel=1e-6)

@pytest.mark.cpu_only('where a device mode is on, torch calls a method that was replaced twice')
def test_many_numbers_are_read_at_once(monkeypatch):
    "Numbers stay where they are among them, NaN and infinity survive, and no precision is lost"
    reads,tolist = [],torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, 'tolist', lambda t: reads.append(1) or tolist(t))
    x = torch.tensor(2., requires_grad=True)*3
    got = read_all([1, x, 0.1, torch.tensor(math.inf), torch.tensor([7]), torch.tensor(1/3, dtype=torch.float64),
                    torch.tensor(60000., dtype=torch.float16), torch.tensor(True)])
    assert got==[1, 6., 0.1, math.inf, 7., 1/3, 60000., 1.] and reads==[1]
    assert math.isnan(read_all([torch.tensor(math.nan), 3])[0]) and read_all([2, 0.5])==[2, 0.5] and read_all([])==[] and len(reads)==2

def test_all_that_is_read_is_added_up_over_a_group(monkeypatch):
    "Numbers travel as well, by one collective: fp16 would overflow in the sum"
    calls = []
    def all_reduce(t, group):
        calls.append((t.clone(), group))
        t.mul_(2) # the other process has the same
    monkeypatch.setattr(torch.distributed, 'all_reduce', all_reduce)
    assert read_all([torch.tensor(60000., dtype=torch.float16), 3, torch.tensor(math.inf)], group='both')==[120000., 6., math.inf]
    assert len(calls)==1 and calls[0][1]=='both' and len(calls[0][0])==3

def test_numbers_are_made_where_the_tensors_are(monkeypatch):
    "A copy from the host's memory to a GPU would wait for all that the GPU has to do"
    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))
    monkeypatch.setattr(torch.distributed, 'all_reduce', lambda t, group: None)
    x = torch.tensor(2.)
    with Operators() as ops: assert read_all([x, 3, True, 0.5], group='all')==[2., 3., 1., 0.5]
    with Operators() as copied: torch.tensor(3.)
    assert torch.ops.aten.full in ops.names and copied.names=={torch.ops.aten.lift_fresh} and not copied.names & ops.names
