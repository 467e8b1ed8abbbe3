"Processes that have imported fastai, and nothing of this package: one that runs code; two in a group, which live on from test to test"
import os,sys,tempfile,traceback,warnings
from concurrent.futures import ProcessPoolExecutor,TimeoutError as NoAnswer
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
import torch
import torch.distributed as dist
import as_cuda

timeout = 20 # seconds, for which a rank waits for another

forks = get_context('forkserver') # it imports what takes long, once
forks.set_forkserver_preload(['fastai.basics','torch._dynamo','accelerate','pytest','hypothesis'])

def _run(code, cwd):
    assert 'fastai_amp16' not in sys.modules
    warnings.simplefilter('ignore')
    as_cuda.install_if_asked()
    os.chdir(cwd)
    exec(code, vars(sys.modules['__main__']))

def in_a_process(code, cwd):
    "Run `code` in a new process, and raise what it raises"
    with ProcessPoolExecutor(1, forks) as pool: pool.submit(_run, code, str(cwd)).result()

def _work(rank, path, backend, timeout, context, f, args):
    "Run `f` as process `rank` of two"
    torch.set_num_threads(1)
    as_cuda.install_if_asked()
    warnings.simplefilter('ignore', FutureWarning)
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=f'file://{path}', rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
    try:
        with context(rank): return f(rank, *args)
    except BaseException: raise AssertionError('\n'.join(traceback.format_exc().splitlines()[-12:])) from None # others may not be pickled

def _error(future):
    try: return future.exception(3*timeout)
    except NoAnswer: return f'no answer within {3*timeout} seconds' # a deadlock, of which gloo does not know

class Processes:
    "Two, over gloo unless told otherwise: call it with a function and its arguments besides the rank; gives what it returns in each"
    pools = None
    def __init__(self, context, backend='gloo', timeout=timeout): # the context is for each run, and takes the rank
        self.context,self.backend,self.timeout = context,backend,timeout
    def __call__(self, f, *args):
        if self.pools is None:
            self.pools = [ProcessPoolExecutor(1, forks) for _ in range(2)]
            self.store = Path(tempfile.mkdtemp())/'store'
        futures = [p.submit(_work, i, self.store, self.backend, self.timeout, self.context, f, args) for i,p in enumerate(self.pools)]
        errors = [f'rank {i}: {e}' for i,o in enumerate(futures) if (e := _error(o))]
        if not errors: return [o.result() for o in futures]
        self.end()
        raise AssertionError('\n'.join(errors))
    def end(self):
        for pool in self.pools or ():
            for p in list(pool._processes.values()): p.kill()
        self.pools = None
