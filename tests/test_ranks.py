"Two real processes over gloo, which decide together, and make runs that they throw away"
from contextlib import contextmanager
import pytest,torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState,powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from fastai_amp16.train import ranks as ranks_module
from fastai_amp16.train.grads import read_all
from fastai_amp16.train.ranks import RankFailed,Ranks
from processes import Processes

pytestmark = pytest.mark.cpu_only('processes over gloo')

def nothing_left():
    assert torch._C._len_torch_dispatch_stack()==0
    assert not is_in_torch_dispatch_mode(True) and not is_in_torch_dispatch_mode(False)

@contextmanager
def in_step(rank):
    "Afterwards both still are"
    yield
    nothing_left()
    assert summed(torch.tensor(rank+1.))==3

@pytest.fixture(scope='module')
def pair():
    pair = Processes(in_step)
    yield pair
    pair.end()

@pytest.fixture
def one():
    "A group of one process, this one"
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

def summed(t, op=dist.ReduceOp.SUM):
    dist.all_reduce(t, op)
    return t

# Numbers and objects

class Reads(TorchFunctionMode):
    "Counts what waits for the device"
    n = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += func.__name__ in ('tolist','item','__float__','__bool__','__int__','cpu','numpy')
        return func(*args, **(kwargs or {}))

def test_alone_all_numbers_are_read_at_once():
    x,half = torch.tensor(2., requires_grad=True),torch.tensor([0.5], dtype=torch.float16)
    with Reads() as reads: res = Ranks().read([x*3, 3, half, torch.tensor(70_000), 1e9, torch.tensor(1/3, dtype=torch.float64), True])
    assert res==[6.,3.,0.5,70_000.,1e9,1/3,1.] and reads.n==1 and all(type(o) is float for o in res)
    assert Ranks().read([])==[] and Ranks().read([1,2])==[1.,2.]

def test_plain_numbers_stay_what_they_are():
    res = read_all([3, torch.tensor(2.)])
    assert res==[3,2.] and type(res[0]) is int and read_all([3])==[3] and read_all([])==[]

def test_alone_there_is_one_rank():
    ranks = Ranks(nn.Linear(1,1))
    assert (ranks.ddp,ranks.group,ranks.size,ranks.rank)==(None,None,1,0) and ranks.gather(ranks)==[ranks]
    with ranks.no_sync(): nothing_left()
    assert ranks.any(1) and not ranks.any([]) and ranks.all('yes') and not ranks.all(None)
    assert ranks.all_raise()

@pytest.mark.parametrize('wrap', [lambda m: m, nn.DataParallel, torch.compile], ids=['ddp','data parallel','compiled'])
def test_the_group_is_found_in_wrappers(one, wrap):
    ddp = DistributedDataParallel(nn.Linear(2,1))
    ranks = Ranks(wrap(ddp))
    assert ranks.ddp is ddp and ranks.group is ddp.process_group and (ranks.size,ranks.rank)==(1,0)
    assert Ranks(DistributedDataParallel(torch.compile(nn.Linear(2,1)))).ddp is not None

def _reads(rank):
    ranks,large = Ranks(DistributedDataParallel(nn.Linear(2,1))),torch.tensor([60_000.], dtype=torch.float16)
    assert (ranks.size,ranks.rank)==(2,rank)
    with Reads() as reads: res = ranks.read([large, torch.tensor(1.+rank), 3])
    assert res==[120_000.,3.,6.] and reads.n==1
    a,b,c = ranks.read([torch.tensor(float('nan') if rank else 1.), float('inf') if rank==0 else 1, -0.])
    assert a!=a and b==float('inf') and c==0
    assert ranks.read([rank, 2.5])==[1.,5.] and ranks.read([])==[]
    assert ranks.read([torch.tensor(1., dtype=torch.float64 if rank else torch.float16), torch.tensor(1.)])==[2.,2.] # each in another type
    assert ranks.gather({'rank':rank, 'x':[1]*(rank+1)})==[{'rank':0, 'x':[1]}, {'rank':1, 'x':[1,1]}]

def test_numbers_and_objects_of_two_ranks(pair): pair(_reads)

def _decides(rank):
    ranks = Ranks(DistributedDataParallel(nn.Linear(2,1)))
    assert ranks.any(rank) and not ranks.all(rank) and not ranks.any(0) and ranks.all(2.)

def test_a_yes_or_no_is_the_same_on_both_ranks(pair): pair(_decides)

def _fails(rank, which):
    "Where the others gather, a rank may say that it cannot go on; then they can gather again"
    ranks = Ranks(DistributedDataParallel(nn.Linear(2,1)))
    if rank in which: ranks.fail('raises KeyError (now)')
    else:
        with pytest.raises(RankFailed, match=r'^Rank 1 raises KeyError \(now\)$'): ranks.all(True)
    assert ranks.gather(rank)==[0,1]

@pytest.mark.parametrize('which', [[1],[0,1]])
def test_a_rank_that_fails_tells_the_others(pair, which): pair(_fails, which)

# Runs that all ranks make together and throw away

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16,1))

class Branches(nn.Module):
    "Uses one of two layers"
    def __init__(self): super().__init__(); self.layers,self.i = nn.ModuleList([nn.Linear(8,1) for _ in range(2)]),0
    def forward(self, x): return self.layers[self.i](x)

def branches():
    torch.manual_seed(0)
    return Branches()

settings = {'plain':{}, 'unused':dict(find_unused_parameters=True), 'static':dict(static_graph=True),
            'views':dict(gradient_as_bucket_view=True)}

class Boom(Exception): pass

def thrown_away(ddp, ranks, x, kind):
    "A run of all ranks together, after which everything is restored"
    buffers,grads = [b.clone() for b in ddp.buffers()],[p.grad for p in ddp.parameters()]
    before = ddp.require_forward_param_sync,ddp.require_backward_grad_sync
    for p in ddp.parameters(): p.grad = None
    def boom(*args): raise Boom
    raises = kind.startswith('raises') and (kind!='raises on one' or ranks.rank==1)
    own = ddp.module.layers[ddp.module.i] if isinstance(ddp.module, Branches) else ddp.module[0]
    hook = own.register_forward_hook(boom) if raises else None
    try:
        with ranks.no_sync():
            if kind=='no grad':
                with torch.no_grad(): ddp(x)
            elif kind=='forward': ddp(x)
            else: ddp(x).square().sum().mul(float('inf') if kind=='inf' and ranks.rank==1 else 1.).backward()
    except Boom: pass
    if hook: hook.remove()
    if kind=='inf': assert own.weight.grad.isfinite().all()==(ranks.rank==0) # of its own batch
    assert (ddp.require_forward_param_sync,ddp.require_backward_grad_sync)==before
    for b,v in zip(ddp.buffers(), buffers): b.data.copy_(v)
    for p,g in zip(ddp.parameters(), grads): p.grad = g

kinds = 'backward','inf','forward','no grad','raises on all','raises on one','backward'

def trained(rank, make, kwargs, when=None, turns=False, hook=False, accumulate=False):
    "Four steps of SGD, and the gradients of each; runs that are thrown away come `when` it says, in all but the first step"
    ddp = DistributedDataParallel(make(), **kwargs)
    if hook: ddp.register_comm_hook(None, fp16_compress_hook)
    ranks,opt = Ranks(ddp),torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(rank)
    batches,res = [torch.randn(4,8) for _ in range(4)],[]
    def runs(here, i):
        for kind in kinds if here==when and i else (): thrown_away(ddp, ranks, batches[i], kind)
    for i,x in enumerate(batches):
        # a step may use other layers than the last one, but not than the runs that were thrown away since, of the same batch
        if isinstance(ddp.module, Branches): ddp.module.i = i%2 if turns else 0
        runs('before', i)
        opt.zero_grad()
        if accumulate:
            with ddp.no_sync(): ddp(x*2).square().sum().backward()
        ddp(x).square().sum().backward()
        runs('after', i)
        res.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
        opt.step()
    return [*res, *(b.float() for b in ddp.buffers())]

def _throws_away(rank, make, kwargs, when, *rest):
    ref,res = trained(rank, make, kwargs, None, *rest),trained(rank, make, kwargs, when, *rest)
    both = [torch.empty_like(res[3]) for _ in range(2)]
    dist.all_gather(both, res[3])
    assert torch.equal(*both) and all(map(torch.equal, res, ref))

@pytest.mark.parametrize('when', ['before','after'])
@pytest.mark.parametrize('setting', settings)
def test_the_next_step_is_an_ordinary_one(pair, setting, when):
    pair(_throws_away, branches if setting=='unused' else model, settings[setting], when, when=='before')

@pytest.mark.parametrize('when', ['before','after'])
def test_with_compression_and_accumulation(pair, when): pair(_throws_away, model, {}, when, False, True, True)

def _forgets(rank):
    "PowerSGD keeps nothing of an infinite gradient"
    ddp = DistributedDataParallel(nn.Linear(64,64))
    ddp.register_comm_hook(state := PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
    ranks,x = Ranks(ddp),torch.randn(4,64)
    for i in range(6):
        ddp.zero_grad()
        (ddp(x).sum()*(float('inf') if i==3 else 1)).backward()
        if i==3:
            assert any(not t.isfinite().all() for t in state.error_dict.values())
            ranks.forget()
    assert state.error_dict and all(p.grad.isfinite().all() for p in ddp.parameters())
    Ranks().forget()

def test_compression_forgets_what_was_not_used(pair): pair(_forgets)

# A rank that raises

def _raises_alone(rank, which):
    "Twice: what the first time has left in the store does not count"
    ranks_module._patience = 1
    group = Ranks(DistributedDataParallel(nn.Linear(2,1)))
    for _ in range(2):
        if rank in which: assert not group.all_raise()
        dist.barrier()

def _all_raise(rank):
    group = Ranks(DistributedDataParallel(nn.Linear(2,1)))
    for _ in range(3): assert group.all_raise()

@pytest.mark.parametrize('which', [[0],[1]])
def test_a_rank_that_raises_alone_finds_out(pair, which): pair(_raises_alone, which)

def test_ranks_that_all_raise_find_out(pair): pair(_all_raise)
