"Two real processes over gloo, of which one runs by itself now and then"
import sys,threading
from contextlib import contextmanager
from functools import partial
import pytest,torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState,powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as dist_nn
from torch.distributed.tensor import DTensor,Partial,Shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode,is_in_torch_dispatch_mode
from fastai_amp16.grads import read_all
from fastai_amp16.ranks import Echo,Ranks
from processes import Processes,timeout

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
    pair = Processes(in_step, ['fastai_amp16.ranks','torch._dynamo'])
    yield pair
    pair.end()

@pytest.fixture
def one():
    "A group of one process, this one"
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

@pytest.fixture
def four():
    "The third of four ranks, in a group that sends nothing"
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group('fake', store=FakeStore(), rank=2, world_size=4)
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
    with ranks.alone(): nothing_left()

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

# Collectives beside the real ones

def parts(): return [torch.arange(3.)+10*i for i in range(2)]

def blanks(): return [torch.zeros(3) for _ in range(2)]

def into(f, t, n=None, **kwargs):
    "What `f` writes to the first of its arguments: a tensor of `n` numbers, or a list of tensors"
    out = torch.zeros(n) if n else blanks()
    f(out, t, **kwargs)
    return out if n else torch.stack(out)

def later():
    "With a `Work` to wait for, and its future"
    t = torch.arange(3.)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    assert work.is_completed() and torch.equal(work.get_future().wait()[0], t)
    return t

def coalesced():
    ts = parts()
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in ts: dist.all_reduce(t)
    manager.wait()
    return torch.stack(ts)

def several():
    ts = parts()
    dist.all_reduce_coalesced(ts)
    return torch.stack(ts)

def to_all_unevenly():
    n = 1+dist.get_rank() # of each rank's three rows one goes to rank 0, and two to rank 1
    out = torch.zeros(2*n, 2)
    dist.all_to_all_single(out, torch.arange(6.).view(3,2), [n,n], [1,2])
    return out

def of_root(f, root):
    "With an argument that only rank `root` has; what it does there"
    mine,out = dist.get_rank()==root,torch.zeros(3)
    if f is dist.gather: f(torch.arange(3.), (out := blanks()) if mine else None, root)
    elif f is dist.scatter: f(out, parts() if mine else None, root)
    elif f is dist.reduce: f(out := torch.arange(3.), root)
    elif f is dist.broadcast: f(out := torch.arange(3.)*mine, root)
    return torch.cat(out if isinstance(out, list) else [out]) if mine or f in (dist.broadcast,dist.scatter) else torch.zeros(0)

def objects(root):
    every,there,sent = [None]*2,[None]*2 if dist.get_rank()==root else None,[3 if dist.get_rank()==root else None]
    dist.all_gather_object(every, {'a':1})
    dist.gather_object({'a':2}, there, root)
    dist.broadcast_object_list(sent, root)
    return torch.tensor([o['a'] for o in every+(there or [])]+sent)

def barriers():
    dist.barrier()
    dist.monitored_barrier()
    return torch.zeros(0)

def collectives(root):
    "What becomes of numbers that both ranks have, by name; `root` is the rank that matters where one does"
    ints,ops = torch.tensor([5,6,12]),dist.ReduceOp.RedOpType.__members__
    res = {k: partial(lambda v: summed(torch.arange(1., 4.), v), v) for k,v in ops.items() if k in ('SUM','AVG','PRODUCT','MIN','MAX')}
    res |= {k: partial(lambda v: summed(ints.clone(), v), v) for k,v in ops.items() if k in ('BAND','BOR','BXOR')}
    res |= {f.__name__: partial(of_root, f, root) for f in (dist.gather,dist.scatter,dist.reduce,dist.broadcast)}
    return dict(**res, later=later, coalesced=coalesced, several=several, to_all_unevenly=to_all_unevenly, barriers=barriers,
        half=lambda: summed(torch.tensor([60_000.,1.], dtype=torch.float16)), number=lambda: summed(torch.tensor(1.)),
        all_gather=lambda: into(dist.all_gather, torch.arange(3.)), objects=lambda: objects(root),
        gather_one=lambda: into(dist.all_gather_into_tensor, torch.arange(3.), 6),
        reduce_scatter=lambda: into(dist.reduce_scatter, parts(), 3),
        reduce_scatter_max=lambda: into(dist.reduce_scatter, parts(), 3, op=dist.ReduceOp.MAX),
        reduce_scatter_one=lambda: into(dist.reduce_scatter_tensor, torch.cat(parts()), 3),
        to_all=lambda: into(dist.all_to_all, parts()), to_all_one=lambda: into(dist.all_to_all_single, torch.cat(parts()), 6))

def functional(root):
    "The same, of functional collectives"
    ns,g,t = torch.ops._c10d_functional,dist.group.WORLD,torch.arange(4.)
    def wait(f, *args, **kwargs): return ns.wait_tensor(f(*args, g.group_name, **kwargs))
    def many(f, *args): return torch.stack([ns.wait_tensor(o) for o in f([t.clone(),t+1], *args, g.group_name)])
    ops = {o: partial(lambda o: funcol.all_reduce(t, o, g), o) for o in ('sum','avg','product','min','max')}
    return dict(**ops, all_reduce=lambda: wait(ns.all_reduce, t, 'sum'), in_place=lambda: wait(ns.all_reduce_, t.clone(), 'sum'),
        several=lambda: many(ns.all_reduce_coalesced, 'sum'), several_in_place=lambda: many(ns.all_reduce_coalesced_, 'sum'),
        gather=lambda: funcol.all_gather_tensor(t, 0, g), gather_1=lambda: funcol.all_gather_tensor(t.view(2,2), 1, g),
        gather_several=lambda: many(ns.all_gather_into_tensor_coalesced, 2),
        gather_out=lambda: wait(ns.all_gather_into_tensor_out, t, 2, out=torch.zeros(8)),
        reduce_scatter=lambda: funcol.reduce_scatter_tensor(t, 'sum', 0, g),
        reduce_scatter_1=lambda: funcol.reduce_scatter_tensor(t.view(2,2), 'sum', 1, g),
        reduce_scatter_several=lambda: many(ns.reduce_scatter_tensor_coalesced, 'sum', 2),
        to_all=lambda: funcol.all_to_all_single(t, None, None, g), broadcast=lambda: funcol.broadcast(t, root, g))

def tensor_parallel(root):
    "What a `DTensor` does within"
    mesh,t = init_device_mesh('cpu', (2,)),torch.arange(4.)
    def add():
        rows,columns = [DTensor.from_local(t.view(s), mesh, [p], run_check=False) for s,p in (((2,2),Shard(0)),((4,1),Shard(1)))]
        return (rows+columns).to_local() # all to all, within the operation
    return dict(added=add, full=lambda: DTensor.from_local(t, mesh, [Shard(0)], run_check=False).full_tensor(),
                reduced=lambda: DTensor.from_local(t, mesh, [Partial()], run_check=False).full_tensor())

def waited(t): return t.wait() if isinstance(t, funcol.AsyncCollectiveTensor) else t

def _echoes(rank, table, least):
    compared = set()
    for alone in (0,1):
        for name,f in table(alone).items():
            try: real = waited(f())
            except RuntimeError as e: # some versions of gloo do not have all
                assert any(o in str(e).lower() for o in ('support','cannot use','not implemented')), (name,e)
                continue
            if rank==alone:
                with Ranks().alone(): ours = waited(f())
                torch.testing.assert_close(ours, real, msg=lambda m, name=name: f'{name}: {m}')
            compared.add(name)
        dist.barrier()
    assert len(compared)>=least, sorted(compared)

@pytest.mark.parametrize('table,least', [(collectives,20),(functional,13),(tensor_parallel,3)])
def test_collectives_give_what_they_would_if_the_other_rank_had_the_same(pair, table, least): pair(_echoes, table, least)

def test_what_gloo_does_not_have(four):
    t = torch.arange(3.)
    with Ranks().alone():
        assert into(dist.all_gather_into_tensor, t, (4,3)).tolist()==[[0,1,2]]*4
        assert into(dist.all_gather_into_tensor, torch.tensor(2.), 4).tolist()==[2]*4
        assert into(dist.reduce_scatter_tensor, torch.arange(8.), 2).tolist()==[16,20] # the third of four parts, four times
        assert summed(torch.tensor([True,False])).tolist()==[True,False]
        assert summed(torch.tensor([3,5]), dist.ReduceOp.BXOR).tolist()==[0,0]
        assert summed(torch.ones(2,2,dtype=torch.float64).to_sparse()).to_dense().tolist()==[[4,4],[4,4]]
        with pytest.raises(RuntimeError, match='only another process has'): summed(t, dist._make_nccl_premul_sum(2.))

def test_the_first_are_answered_and_the_others_go_through(four):
    def run():
        return [dist_nn.all_reduce(torch.ones(1)).item(), waited(funcol.all_reduce(torch.ones(1), 'sum', dist.group.WORLD)).item(),
                summed(torch.ones(1)).item()]
    with Ranks().alone() as echo: assert run()==[4,4,4]
    assert echo.n==3
    for first in range(4):
        with Echo(first) as echo: assert run()==[4]*first+[1]*(3-first)
        assert echo.n==first

# What a rank cannot know

def refused(f, *args, **kwargs):
    with pytest.raises(RuntimeError, match='running again on one process alone, and .* needs data that only another process has'):
        f(*args, **kwargs)

def _refuses(rank, alone):
    if rank!=alone: return
    t,other,g = torch.arange(4.),1-rank,dist.group.WORLD
    with Ranks().alone():
        dist.send(t, other)
        refused(dist.recv, t, other)
        refused(dist.recv, t)
        refused(dist.broadcast, t, other)
        refused(dist.scatter, t, None, other)
        refused(dist_nn.broadcast, t, other)
        refused(funcol.broadcast, t, other, g)
        refused(dist.all_to_all_single, torch.zeros(4), t, [1,3], [2,2])
        refused(dist.all_gather, [torch.zeros(4),torch.zeros(5)][::1 if rank else -1], t)
        assert t.tolist()==[0,1,2,3]

@pytest.mark.parametrize('alone', [0,1])
def test_what_only_another_rank_knows_is_refused(pair, alone): pair(_refuses, alone)

def test_a_torch_without_these_names_refuses(four, monkeypatch):
    monkeypatch.setattr('fastai_amp16.ranks.ProcessGroup', None)
    with pytest.raises(RuntimeError, match='does not let c10d.allreduce_.default run on one process alone'), Echo(): summed(torch.ones(1))
    nothing_left()

# Gradients

def _nn_losses(root):
    "Losses of four numbers that send what is differentiated; what is cut for the ranks has equal parts, so that all go on with the same"
    g = dist.group.WORLD
    def halves(x): return [x[:2],x[:2]*1]
    res = dict(all_reduce=lambda x: dist_nn.all_reduce(x).square().sum(), maximum=lambda x: dist_nn.all_reduce(x*2).max(),
        all_gather=lambda x: sum((i+1)*t.pow(3).sum() for i,t in enumerate(dist_nn.all_gather(x))),
        contrastive=lambda x: torch.cat(dist_nn.all_gather(x)).softmax(0)[:3].sum(),
        all_to_all=lambda x: sum((i+1)*t.square().sum() for i,t in enumerate(dist_nn.all_to_all(list(torch.zeros(2,2)), halves(x)))),
        all_to_all_single=lambda x: (dist_nn.all_to_all_single(torch.zeros(4), torch.cat(halves(x))).square()*torch.arange(4.)).sum(),
        sync_bn=lambda x: (_sync_bn(x.view(4,1)).flatten()*torch.arange(4.)).square().sum())
    for name,args in dict(all_gather_tensor=(0,), reduce_scatter_tensor=('sum',0), all_to_all_single=(None,None)).items():
        f = getattr(funcol, f'{name}_autograd', None)
        if f: res[f'functional {name}'] = lambda x, f=f, args=args: (f(torch.cat(halves(x)), *args, g).square()*3).sum()
    return res

def _sync_bn(x):
    "A norm whose statistics are those of all ranks, as `nn.SyncBatchNorm` on a GPU"
    n = len(x)*dist.get_world_size()
    mean = dist_nn.all_reduce(x.sum(0))/n
    return (x-mean)*(dist_nn.all_reduce((x-mean).square().sum(0))/n+1e-5).rsqrt()

def _grad(f):
    x = torch.tensor([1.,-2.,3.,0.5], requires_grad=True)
    loss = f(x*1)
    loss.backward()
    return torch.cat([loss.detach().view(1), x.grad])

def _gradients(rank):
    compared = 0
    for alone in (0,1):
        for name,f in _nn_losses(alone).items():
            try: real = _grad(f)
            except RuntimeError as e:
                assert 'support' in str(e).lower(), (name,e)
                continue
            if rank==alone:
                with Ranks().alone(): torch.testing.assert_close(_grad(f), real, msg=lambda m, name=name: f'{name}: {m}')
            compared += 1
        dist.barrier()
    assert compared>=2*6, compared

def test_gradients_through_collectives(pair): pair(_gradients)

# Threads

def _other_thread(rank):
    "A thread of rank 1 sends while another one is alone, forward and backward"
    res,started,done = [],threading.Event(),threading.Event()
    def sends():
        started.wait(timeout)
        for i in range(5): res.append(summed(torch.tensor(float(rank+i))).item())
        done.set()
    thread = threading.Thread(target=sends)
    thread.start()
    if rank==0: started.set()
    else:
        with Ranks().alone():
            started.set()
            while not done.is_set():
                x = torch.ones(2, requires_grad=True)
                dist_nn.all_reduce(x).sum().backward()
                assert x.grad.tolist()==[2,2] and summed(torch.tensor(1.))==2
    thread.join(timeout)
    assert res==[1.,3.,5.,7.,9.]

def test_other_threads_reach_the_other_rank(pair): pair(_other_thread)

# DistributedDataParallel

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8,16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16,1))

class Branches(nn.Module):
    "Uses one of two layers, by turns"
    def __init__(self): super().__init__(); self.layers,self.i = nn.ModuleList([nn.Linear(8,1) for _ in range(2)]),0
    def forward(self, x): return self.layers[self.i](x)

def branches():
    torch.manual_seed(0)
    return Branches()

def trained(rank, make, kwargs, when, at, inner, hook=False, accumulate=False):
    "Three steps of SGD, and the weights after each; rank 1 runs alone in step `at`, when it says, and may raise there"
    ddp = DistributedDataParallel(make(), **kwargs)
    if hook: ddp.register_comm_hook(None, fp16_compress_hook)
    ranks,opt = Ranks(ddp),torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(rank)
    batches,res = [torch.randn(4,8) for _ in range(3)],[]
    def alone(here, i):
        if (here,i)!=(when,at) or rank==0: return
        buffers,grads = [b.clone() for b in ddp.buffers()],[p.grad for p in ddp.parameters()]
        before,x = dict(vars(ddp)),batches[i]
        for p in ddp.parameters(): p.grad = None
        with ranks.alone():
            for _ in range(2): (ddp.module if inner else ddp)(x).square().sum().backward()
        changed = [k for k,v in vars(ddp).items() if before.get(k) is not v and k not in ('_lazy_init_ran','_has_rebuilt_buckets')]
        assert not changed, changed
        for b,v in zip(ddp.buffers(), buffers): b.data.copy_(v)
        for p,g in zip(ddp.parameters(), grads): p.grad = g
    for i,x in enumerate(batches):
        if isinstance(ddp.module, Branches): ddp.module.i = i%2
        alone('before', i)
        opt.zero_grad()
        if accumulate:
            with ddp.no_sync(): ddp(x*2).square().sum().backward()
        loss = ddp(x).square().sum()
        alone('between', i)
        loss.backward()
        alone('after', i)
        res.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
        opt.step()
    return res

settings = {'plain':{}, 'unused':dict(find_unused_parameters=True), 'static':dict(static_graph=True),
            'views':dict(gradient_as_bucket_view=True)}

def _runs_alone(rank, make, kwargs, when, inner, hook, accumulate):
    ref = trained(rank, make, kwargs, None, None, inner, hook, accumulate)
    first = kwargs.get('static_graph') and when!='after' # the graph is recorded in the first backward pass
    for at in range(bool(first), 3):
        res = trained(rank, make, kwargs, when, at, inner, hook, accumulate)
        both = [torch.empty_like(res[-1]) for _ in range(2)]
        dist.all_gather(both, res[-1])
        assert torch.equal(*both), at
        assert all(torch.equal(a, b) for a,b in zip(res, ref)), at

@pytest.mark.parametrize('inner', [False,True], ids=['ddp','module'])
@pytest.mark.parametrize('when', ['before','between','after'])
@pytest.mark.parametrize('setting', settings)
def test_the_next_step_is_an_ordinary_one(pair, setting, when, inner):
    pair(_runs_alone, branches if setting=='unused' else model, settings[setting], when, inner, False, False)

@pytest.mark.parametrize('when', ['before','between','after'])
def test_with_compression_and_accumulation(pair, when): pair(_runs_alone, model, {}, when, False, True, True)

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

def _static(rank, inner):
    "Before the first step of a static graph, a rank alone runs forward, and not backward"
    ddp = DistributedDataParallel(model(), static_graph=True)
    ranks,x = Ranks(ddp),torch.ones(4,8)
    if rank:
        with ranks.alone():
            loss = (ddp.module if inner else ddp)(x).sum()
            with pytest.raises(RuntimeError, match='static_graph=True.* records the graph'): loss.backward()
    assert all(p.grad is None for p in ddp.parameters())
    for _ in range(3): ddp(x).sum().backward()
    if rank:
        with ranks.alone(): ddp(x).sum().backward()

@pytest.mark.parametrize('inner', [False,True], ids=['ddp','module'])
def test_before_a_static_graph_is_recorded(pair, inner): pair(_static, inner)

def _raises(rank, where):
    "A run alone that raises in its forward or backward pass, between those of all ranks"
    ddp = DistributedDataParallel(model())
    ranks,x = Ranks(ddp),torch.randn(4,8)
    def boom(*args): raise ValueError('boom')
    for _ in range(3):
        loss = ddp(x).sum()
        if rank:
            before = dict(vars(ddp))
            with pytest.raises(ValueError, match='boom'), ranks.alone():
                y = ddp(x)
                if where=='forward': boom()
                hook = ddp.module[1].weight.register_hook(boom) # when half of the gradients have come
                y.sum().backward()
            if where!='forward': hook.remove()
            assert all(vars(ddp)[k] is v for k,v in before.items() if k!='_has_rebuilt_buckets')
            nothing_left()
            ddp.zero_grad()
        loss.backward()
        g = ddp.module[0].weight.grad
        both = [torch.empty_like(g) for _ in range(2)]
        dist.all_gather(both, g)
        assert torch.equal(*both)
        ddp.zero_grad()

@pytest.mark.parametrize('where', ['forward','backward'])
def test_a_run_alone_that_raises_leaves_nothing(pair, where): pair(_raises, where)

def _buffers(rank):
    "A rank alone does not wait for the buffers of rank 0, and the next step sends them"
    ddp = DistributedDataParallel(model())
    ranks,x = Ranks(ddp),torch.randn(4,8)+rank
    ddp(x).sum().backward()
    if rank:
        with ranks.alone(), torch.no_grad():
            for _ in range(3): ddp(x)
        assert ddp.module[1].num_batches_tracked==4
    ddp(x).sum().backward()
    assert ddp.module[1].num_batches_tracked==2

def test_buffers_are_sent_in_the_next_step(pair): pair(_buffers)

# No trace

def test_contexts_within_each_other(one):
    ddp = DistributedDataParallel(model())
    ranks,before = Ranks(ddp),dict(vars(ddp))
    with ranks.alone():
        with ranks.alone(): ddp(torch.ones(4,8)).sum().backward()
        assert not ddp.require_backward_grad_sync and torch._C._len_torch_dispatch_stack()==1
        assert ranks.read([torch.tensor(2.)])==[2.]
    nothing_left()
    assert all(vars(ddp)[k] is v for k,v in before.items() if k!='_lazy_init_ran')

def _interrupted(f, n):
    "Run `f` with a Ctrl-C at the `n`th line of the contexts that it enters; was there one?"
    count,files = 0,('fastai_amp16/ranks.py','contextlib.py','_python_dispatch.py')
    def trace(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.endswith(files): return None
        if event=='line':
            count += 1
            if count==n: raise KeyboardInterrupt
        return trace
    old = sys.gettrace()
    sys.settrace(trace)
    try: f()
    except KeyboardInterrupt: pass
    finally: sys.settrace(old)
    return count>=n

def test_an_interrupt_leaves_nothing(one):
    ddp = DistributedDataParallel(model())
    ranks,x = Ranks(ddp),torch.ones(4,8)
    ddp(x).sum().backward()
    before,n = dict(vars(ddp)),0
    def run():
        with ranks.alone(): ddp(x)
    while _interrupted(run, n := n+1):
        nothing_left()
        assert all(vars(ddp)[k] is v for k,v in before.items()), n
    assert n>100
    ddp(x).sum().backward()

class Ops(TorchFunctionMode):
    "Notes the functions that are called"
    def __init__(self): super().__init__(); self.names = []
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))

def test_other_modes_do_not_see_the_answers(four):
    with Ops() as ops, Ranks().alone():
        t = torch.ones(2)
        dist.group.WORLD.allreduce([t]).wait()
    assert ops.names==['ones'] and t.tolist()==[4,4]

def test_an_answer_does_not_count_as_a_change(four):
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    with Ranks().alone():
        dist.all_reduce(y.detach())
        y.sum().backward() # autograd would refuse a tensor that was changed in place
    assert y._version==0

def test_compiled_code_stays_compiled(four):
    "Also code that must not fall back to eager mode"
    frames = []
    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward
    def f(x): return funcol.all_reduce(x*2, 'sum', dist.group.WORLD)+1
    f = torch.compile(f, backend=backend, fullgraph=True)
    for _ in range(2):
        assert f(torch.ones(2)).tolist()==[3,3]
        with Ranks().alone(): assert f(torch.ones(2)).tolist()==[9,9]
    assert len(frames)==1

@pytest.mark.skipif(not hasattr(TorchDispatchMode, 'supports_higher_order_operators'), reason='an older torch')
def test_higher_order_operators(four):
    q = torch.randn(1,1,16,8)
    def double(x): return x*2
    from torch._higher_order_ops import cond
    with Ranks().alone(): assert torch.equal(cond(torch.tensor(True), double, double, (q,)), q*2)
