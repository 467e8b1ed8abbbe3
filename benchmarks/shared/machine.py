"The name of the machine, as stored with the results"
import platform
from pathlib import Path
import torch
from fastai.basics import default_device

def machine():
    "The name of the GPU or CPU that trains by default, the version of PyTorch and, on a CPU, the number of threads"
    version = torch.__version__.split('+')[0]
    if default_device().type=='cuda': return f'{torch.cuda.get_device_name()}, torch {version}'
    n,info = torch.get_num_threads(),Path('/proc/cpuinfo')
    names = [o.split(':')[1].strip() for o in info.read_text().splitlines() if o.startswith('model name')] if info.exists() else []
    return f'{names[0] if names else platform.processor() or platform.machine()}, torch {version}, {n} thread{"s"*(n>1)}'
