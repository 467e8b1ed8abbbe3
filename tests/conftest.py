import gc,os,warnings
from contextlib import ExitStack
from zlib import crc32
import pytest

os.environ.setdefault('OMP_NUM_THREADS', '1') # threads that wait for a busy core spin, and a test takes many times as long

devices = 'cpu','cuda','as_cuda','as_cuda:tf32' # the latter two: the CPU, with the habits of CUDA that as_cuda.py describes
asked = os.environ.get('FASTAI_AMP16_DEVICE', 'cpu')
device = 'cpu' if asked.startswith('as_cuda') else asked # what the tests train on

def prepare():
    "Imports and settings that tests need"
    import torch
    import as_cuda
    as_cuda.install_if_asked()
    from fastcore.basics import defaults
    from hypothesis import settings
    with warnings.catch_warnings(): # torch's, at the import of fastai: that torch.jit.script is deprecated
        warnings.simplefilter('ignore', FutureWarning)
        import fastai.callback.all # noqa: F401 (as a notebook does: it brings progress bars and schedules to `Learner`)
        from fastai.torch_core import default_device
    if torch.cuda.is_available(): default_device(device=='cuda')
    defaults.cpus = 0 # no worker processes for data: a fork of a process with threads may never end
    settings.register_profile('repo', deadline=None, derandomize=True)
    settings.load_profile('repo')

def pytest_collection(session):
    if session.config.getoption('dist', 'no')!='no': return # this process starts others for the tests, and imports nothing for them
    prepare()
    if asked=='cpu':
        for o in ours: session.config.addinivalue_line('filterwarnings', o)

ours = ( # what pyproject.toml does with warnings comes before: here, since it imports the package
    'error::fastai_amp16.all.PrecisionWarning', # a test expects its warnings by `pytest.warns`, the mark `warns`, or a filter
    'ignore:On a CPU, convolutions') # tests have tiny images

# Files whose tests do not say yet which warnings they expect: theirs are printed, unless a filter at the test ignores them
unread = 'as_cuda benchmarks comparable compile convergence demo fake_cuda gpu_benchmark memory programs'.split()
shown = pytest.mark.filterwarnings('always::fastai_amp16.all.PrecisionWarning')

@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    "A test with the mark `warns` gives a warning that matches each of its arguments, and no other of ours"
    from fastai_amp16.all import PrecisionWarning
    with ExitStack() as expected:
        for mark in pyfuncitem.iter_markers('warns'):
            for o in mark.args: expected.enter_context(pytest.warns(PrecisionWarning, match=o))
        return (yield)

def pytest_configure(config):
    config.addinivalue_line('markers', 'warns(*patterns): warnings of ours that the test must give')
    config.addinivalue_line('markers', 'slow: takes long, and seldom fails alone: left out by default')
    config.addinivalue_line('markers', 'cpu_only(reason): skipped under FASTAI_AMP16_DEVICE=cuda')
    config.addinivalue_line('markers', 'not_as_cuda(reason): skipped under FASTAI_AMP16_DEVICE=cuda and as_cuda, where CUDA does otherwise')
    if asked not in devices: raise pytest.UsageError(f"FASTAI_AMP16_DEVICE={asked}: it must be one of {', '.join(devices)}")
    if device=='cuda':
        import torch
        if not torch.cuda.is_available(): raise pytest.UsageError("FASTAI_AMP16_DEVICE=cuda, and PyTorch finds no GPU")

def pytest_collection_modifyitems(items):
    """Tests with processes come first, so that they are in the first part that `-n 2` deals out, and these processes start once

    Notebooks come last, that of the callback at the very end: they define everything anew and patch it onto fastai's classes."""
    skipped = {'cpu_only':'on a CPU only', 'not_as_cuda':'CUDA does otherwise'}
    if device=='cpu': del skipped['cpu_only']
    if asked=='cpu': del skipped['not_as_cuda']
    for o in items:
        if o.path.stem.removeprefix('test_') in unread: o.add_marker(shown, append=False)
        for name,why in skipped.items():
            if mark := o.get_closest_marker(name): o.add_marker(pytest.mark.skip(reason=f'{why}: {mark.args[0]}'))
    def key(o): return not {*o.fixturenames} & processes,o.name.startswith('test_notebook'),'_callback' in o.name
    items.sort(key=key)

def pytest_unconfigure(): gc.unfreeze() # else libraries tell at the exit of what nobody frees

@pytest.fixture(scope='module', autouse=True)
def little_to_collect():
    "What the imports have left need not be looked through by each `gc.collect()` of a test"
    gc.collect()
    gc.freeze()

processes = {'in_a_process','ranks','pair'} # fixtures

@pytest.fixture(scope='session')
def in_a_process():
    "A function that runs code in a process that has imported fastai, and nothing of this package"
    from processes import in_a_process
    return in_a_process

with_any = 'faults healing attempts saving'.split() # files with tests of exceptions, interrupts, healing and checkpoints

@pytest.fixture(autouse=True)
def optimizer(request, monkeypatch):
    """These hold with any optimizer: `learner` takes one that is drawn by the name of the test

    FASTAI_AMP16_OPTIMIZER, one of `common.optimizers`, takes the same for all of them."""
    if request.path.stem.removeprefix('test_') not in with_any: return
    from common import optimizers
    name = os.environ.get('FASTAI_AMP16_OPTIMIZER') or [*optimizers][crc32(request.node.nodeid.encode())%len(optimizers)]
    monkeypatch.setattr('common.drawn', optimizers[name])

@pytest.fixture
def uncompared(monkeypatch):
    "For tests that look at each call of the model: none is a comparison with fp32"
    from common import compare_nothing
    compare_nothing(monkeypatch)

@pytest.fixture(scope='module', autouse=True)
def tensors_on_the_device():
    "What a test makes lies where the learners train; what fastai's `Learner` makes, on the CPU, as it does in programs"
    if device=='cpu': yield
    else:
        import torch,fastai.learner
        def tensor(*args, f=fastai.learner.tensor, **kwargs):
            with torch.device('cpu'): return f(*args, **kwargs)
        with pytest.MonkeyPatch.context() as patch, torch.device(device):
            patch.setattr(fastai.learner, 'tensor', tensor) # smooth losses, and the order of predictions
            yield

@pytest.fixture
def as_in_programs():
    "What a test makes lies on the CPU, and fastai takes it to where learners train: for what becomes arrays, or goes to other processes"
    if device=='cpu': yield
    else:
        import torch
        with torch.device('cpu'): yield
