"CUDA's habits on a CPU, which tests/as_cuda.py has"
import sys
from pathlib import Path
from fastai.torch_core import default_device
sys.path.append(str(Path(__file__).parents[2]/'tests'))
import as_cuda

def follow_cuda():
    "From now on, a CPU follows the rules of CUDA, such as those of its autocast"
    if default_device().type=='cpu': as_cuda.install()
