"Two real processes over gloo, of which one runs alone now and then"
import tempfile,traceback,warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
import pytest,torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from fastai_amp16.grads import read_all
from fastai_amp16.ranks import Ranks

timeout = 20 # seconds, for which a rank waits for another

def _worker(rank, path, f, args):
    "Run `f` as process `rank` of two"
    torch.set_num_threads(1)
    warnings.simplefilter('ignore', FutureWarning)
    if not dist.is_initialized():
        dist.init_process_group('gloo', init_method=f'file://{path}', rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
    try:
        f(rank, *args)
        nothing_left()
        assert summed(rank)==1 # the ranks are still in step
    except BaseException: raise AssertionError('\n'.join(traceback.format_exc().splitlines()[-12:])) from None # others may not be pickled

class Pair:
    "Two processes that live on, with their group, from test to test"
    pools = None
    def __call__(self, f, *args):
        if self.pools is None:
            forks = get_context('forkserver')
            forks.set_forkserver_preload(['fastai_amp16.ranks'])
            self.pools = [ProcessPoolExecutor(1, forks) for _ in range(2)]
            self.store = Path(tempfile.mkdtemp())/'store'
        futures = [p.submit(_worker, i, self.store, f, args) for i,p in enumerate(self.pools)]
        errors = [f'rank {i}: {e}' for i,o in enumerate(futures) if (e := o.exception(60))]
        if errors:
            self.end()
            raise AssertionError('\n'.join(errors))
    def end(self):
        for pool in self.pools or ():
            for p in list(pool._processes.values()): p.kill()
        self.pools = None

@pytest.fixture(scope='module')
def pair():
    pair = Pair()
    yield pair
    pair.end()

@pytest.fixture
def one():
    "A group of one process, this one"
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

def nothing_left(): assert torch._C._len_torch_dispatch_stack()==0

def summed(x, op=dist.ReduceOp.SUM):
    t = torch.as_tensor(float(x)) if isinstance(x, int) else x
    dist.all_reduce(t, op)
    return t

def mlp(bn=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16) if bn else nn.Identity(), nn.ReLU(), nn.Linear(16,1))

# Numbers and objects

class Reads(TorchFunctionMode):
    "Counts what waits for the device"
    n = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.n += func.__name__ in ('tolist','item','__float__','__bool__','__int__','cpu','numpy')
        return func(*args, **(kwargs or {}))

mixed = [torch.tensor(2.), 3, torch.tensor([0.5], dtype=torch.float16), torch.tensor(70_000), 1e9, torch.tensor(1/3, dtype=torch.float64), True]

def test_alone_all_numbers_are_read_at_once():
    x = torch.tensor(2., requires_grad=True)
    with Reads() as reads: res = Ranks().read([*mixed, x*3])
    assert res==[2.,3.,0.5,70_000.,1e9,1/3,1.,6.] and reads.n==1 and all(type(o) is float for o in res)
    assert Ranks().read([]) == [] and Ranks().read([1,2])==[1.,2.]

def test_alone_there_is_one_rank():
    ranks = Ranks(nn.Linear(1,1))
    assert (ranks.ddp,ranks.group,ranks.size,ranks.rank)==(None,None,1,0) and ranks.gather(ranks)==[ranks]
    with ranks.alone(): nothing_left()

def test_plain_numbers_stay_what_they_are():
    res = read_all([3, torch.tensor(2.), 'name'])
    assert res==[3,2.,'name'] and type(res[0]) is int and read_all([3])==[3]

@pytest.mark.parametrize('wrap', [lambda m: m, nn.DataParallel, torch.compile], ids=['ddp','data parallel','compiled'])
def test_the_group_is_found_in_wrappers(one, wrap):
    ddp = DistributedDataParallel(nn.Linear(2,1))
    ranks = Ranks(wrap(ddp))
    assert ranks.ddp is ddp and ranks.group is ddp.process_group and (ranks.size,ranks.rank)==(1,0)
    assert Ranks(DistributedDataParallel(torch.compile(nn.Linear(2,1)))).size==1

def _reads(rank):
    ranks = Ranks(DistributedDataParallel(nn.Linear(2,1)))
    assert (ranks.size,ranks.rank)==(2,rank)
    with Reads() as reads: res = ranks.read([torch.tensor(1.+rank), 3, torch.tensor([60_000.], dtype=torch.float16)])
    assert res==[3.,6.,120_000.] and reads.n==1
    a,b,c = ranks.read([torch.tensor(float('nan') if rank else 1.), float('inf') if rank==0 else 1, -0.])
    assert a!=a and b==float('inf') and c==0
    assert ranks.read([rank, 2.5])==[1.,5.] and ranks.read([])==[]
    assert ranks.read([torch.tensor(1e300, dtype=torch.float64), torch.tensor(1.)])==[2e300,2.]
    assert ranks.gather({'rank':rank, 'x':[1]*(rank+1)})==[{'rank':0, 'x':[1]}, {'rank':1, 'x':[1,1]}]

def test_numbers_and_objects_of_two_ranks(pair): pair(_reads)

# Collectives beside the real ones

def parts(dtype=torch.float32): return [torch.arange(3, dtype=dtype)+10*i for i in range(2)]

def blanks(n=2): return [torch.zeros(3) for _ in range(n)]

def into(f, t, n=None, **kwargs):
    "What `f` writes to the first of its arguments: a tensor of `n` numbers, or a list of tensors"
    out = blanks() if n is None else torch.zeros(n)
    f(out, t, **kwargs)
    return torch.stack(out) if n is None else out

def later(f, *args, **kwargs):
    "With a `Work` to wait for, and its future"
    work = f(*args, async_op=True, **kwargs)
    assert work.wait() in (True,None) and work.is_completed()
    work.get_future().wait()
    return args[0]

def coalesced():
    ts = parts()
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in ts: dist.all_reduce(t)
    manager.wait()
    return torch.stack(ts)

def several(ts):
    dist.all_reduce_coalesced(ts)
    return torch.stack(ts)

def objects(root):
    every,there = [None]*2,[None]*2 if dist.get_rank()==root else None
    dist.all_gather_object(every, {'a':1})
    dist.gather_object({'a':2}, there, root)
    sent = [3 if dist.get_rank()==root else None]
    dist.broadcast_object_list(sent, root)
    return torch.tensor([o['a'] for o in every+(there or [])]+sent)

def to_all_unevenly():
    n = 1+dist.get_rank() # the first row for rank 0, two for rank 1
    out = torch.zeros(2*n, 2)
    dist.all_to_all_single(out, torch.arange(6.).view(3,2), [n,n], [1,2])
    return out

def written(f, t, *args):
    f(t, *args)
    return t

def collectives(root):
    "What becomes of numbers that both ranks have, by name; `root` is the rank that matters where one does"
    ints,mine = torch.tensor([5,6,12]),dist.get_rank()==root
    ops = {o: partial(lambda o: summed(torch.arange(1., 4.), getattr(dist.ReduceOp, o)), o) for o in ('SUM','AVG','PRODUCT','MIN','MAX')}
    bits = {o: partial(lambda o: summed(ints.clone(), getattr(dist.ReduceOp, o)), o) for o in ('BAND','BOR','BXOR')}
    half = dict(half=lambda: summed(torch.tensor([60_000.,1.], dtype=torch.float16)), number=lambda: summed(1))
    return dict(**ops, **bits, **half, later=lambda: later(dist.all_reduce, torch.arange(3.)), coalesced=coalesced, several=lambda: several(parts()),
        reduce=lambda: written(dist.reduce, torch.arange(3.), root) if mine else summed_for(root), broadcast=lambda: written(dist.broadcast, torch.arange(3.), root),
        gather=lambda: into(dist.all_gather, torch.arange(3.)), gather_one=lambda: into(dist.all_gather_into_tensor, torch.arange(3.), 6),
        gather_number=lambda: into(dist.all_gather_into_tensor, torch.tensor(2.), 2), gather_stacked=lambda: into(dist.all_gather_into_tensor, torch.arange(3.), (2,3)),
        gather_there=lambda: gathered_at(root), scatter=lambda: scattered_from(root), reduce_scatter=lambda: into(dist.reduce_scatter, parts(), 3),
        reduce_scatter_max=lambda: into(dist.reduce_scatter, parts(), 3, op=dist.ReduceOp.MAX),
        reduce_scatter_one=lambda: into(dist.reduce_scatter_tensor, torch.cat(parts()), 3), to_all=lambda: into(dist.all_to_all, parts()),
        to_all_one=lambda: into(dist.all_to_all_single, torch.cat(parts()), 6), to_all_unevenly=to_all_unevenly, objects=lambda: objects(root), barriers=barriers)

def summed_for(root):
    dist.reduce(torch.arange(3.), root)
    return torch.zeros(0)

def gathered_at(root):
    out = blanks() if dist.get_rank()==root else None
    dist.gather(torch.arange(3.), out, root)
    return torch.stack(out or blanks())

def scattered_from(root):
    out = torch.zeros(3)
    dist.scatter(out, parts() if dist.get_rank()==root else None, root)
    return out

def barriers():
    dist.barrier()
    dist.monitored_barrier()
    return torch.zeros(0)

def functional(root):
    "The same, of functional collectives"
    g,t = dist.group.WORLD,torch.arange(4.)
    ops = {o: partial(lambda o: funcol.all_reduce(t, o, g), o) for o in ('sum','avg','product','min','max')}
    ns = torch.ops._c10d_functional
    def many(f, *args): return torch.stack([ns.wait_tensor(o) for o in f([t,t+1], *args, g.group_name)])
    return dict(**ops, wait=lambda: ns.wait_tensor(ns.all_reduce(t, 'sum', g.group_name)), in_place=lambda: ns.wait_tensor(ns.all_reduce_(t.clone(), 'sum', g.group_name)),
        several=lambda: many(ns.all_reduce_coalesced, 'sum'), several_in_place=lambda: many(lambda ts, *args: ns.all_reduce_coalesced_([t.clone(),ts[1]], *args), 'sum'),
        gather=lambda: funcol.all_gather_tensor(t, 0, g), gather_1=lambda: funcol.all_gather_tensor(t.view(2,2), 1, g), gather_several=lambda: many(ns.all_gather_into_tensor_coalesced, 2),
        gather_out=lambda: ns.wait_tensor(ns.all_gather_into_tensor_out(t, 2, g.group_name, out=torch.zeros(8))),
        reduce_scatter=lambda: funcol.reduce_scatter_tensor(t, 'sum', 0, g), reduce_scatter_1=lambda: funcol.reduce_scatter_tensor(t.view(2,2), 'max', 1, g),
        reduce_scatter_several=lambda: many(ns.reduce_scatter_tensor_coalesced, 'sum', 2),
        to_all=lambda: funcol.all_to_all_single(t, None, None, g), broadcast=lambda: funcol.broadcast(t, root, g))

def _echoes(rank, table, least):
    compared = {}
    for alone in (0,1):
        for name,f in table(alone).items():
            try: real = f()
            except RuntimeError as e: # some versions of gloo do not have all
                assert any(o in str(e).lower() for o in ('support','cannot use','not implemented')), (name,e)
                continue
            if isinstance(real, funcol.AsyncCollectiveTensor): real = real.wait()
            if rank==alone:
                with Ranks().alone(): ours = f()
                torch.testing.assert_close(ours.wait() if isinstance(ours, funcol.AsyncCollectiveTensor) else ours, real, msg=lambda m: f'{name}: {m}')
            compared[name] = True
        dist.barrier()
    assert len(compared)>=least, sorted(compared)

@pytest.mark.parametrize('table,least', [(collectives,20),(functional,10)])
def test_collectives_give_what_they_would_if_the_other_rank_had_the_same(pair, table, least): pair(_echoes, table, least)
