"""Train on scikit-learn's handwritten digits in fp16, in all the processes that `accelerate launch` starts

    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no examples/train_distributed.py
    accelerate launch --multi_gpu --num_processes 2 --mixed_precision no examples/train_distributed.py --cpu

The first line for two GPUs, the second for two processes on a CPU. Each epoch leaves a checkpoint in `models`; `--start_epoch 3` goes on
after the third."""
import argparse,os,warnings
warnings.simplefilter('ignore', FutureWarning) # torch's, at the import of fastai
import torch
from accelerate import DDPCommunicationHookType,DistributedDataParallelKwargs
from fastai.basics import *
from fastai.callback.all import SaveModelCallback
from fastai.distributed import DistributedDL,num_distrib,rank_distrib
from fastai_amp16.all import *
from fastai_amp16.demo import digits_dls,small_cnn

def broadcast_on_cpus(self, t, rank):
    "In place of `DistributedDL._broadcast`, which calls `.cuda()`"
    t = torch.tensor(t)
    torch.distributed.broadcast(t, rank)
    return t.tolist()

def sent(learn, compress):
    "What each step hands to the other processes, in words"
    grads = sum(p.numel() for p in learn.model.parameters() if p.requires_grad)*(2 if compress else 4)
    stats = sum(b.nbytes for b in learn.model.buffers())
    return f"each step: {grads:,} bytes of gradients,\n  {stats:,} of norm statistics, 16 to agree on scale and overflow"

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--epochs', type=int, default=5)
    parser.add_argument('--start_epoch', type=int, default=0, help="load the checkpoint of the epoch before this one, and go on")
    parser.add_argument('--bs', type=int, default=32, help="batch size of each process")
    parser.add_argument('--compress', action='store_true', help="send gradients in fp16: half the bytes")
    parser.add_argument('--cpu', action='store_true', help="train on the CPU, where there are GPUs as well")
    args = parser.parse_args()

    if args.cpu:
        default_device(False)
        DistributedDL._broadcast = broadcast_on_cpus
    else: torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))

    set_seed(0)
    learn = Learner(digits_dls(bs=args.bs), small_cnn(), opt_func=AdamW16, metrics=[accuracy, SkippedSteps()],
                    cbs=[GradientNormClip(1.), SaveModelCallback(every_epoch=True, with_opt=True)]).to_fp16_dynamic()
    set_seed(rank_distrib()) # augmentation and dropout, if there are any, differ from process to process
    if args.start_epoch: learn.load(f'model_{args.start_epoch-1}') # by all: fastai saves on rank 0
    if rank_distrib()==0: print(f"{num_distrib() or 1} processes; {sent(learn, args.compress)}")

    hook = DDPCommunicationHookType.FP16 if args.compress else DDPCommunicationHookType.NO
    ddp,sync_bn = DistributedDataParallelKwargs(comm_hook=hook),not args.cpu # CPUs have no kernels for it
    with learn.distrib_ctx(sync_bn=sync_bn, cpu=args.cpu, kwargs_handlers=[ddp]):
        learn.fit_one_cycle(args.epochs, 3e-3, start_epoch=args.start_epoch)
    if torch.distributed.is_initialized():
        torch.distributed.barrier() # none goes while another still talks to it
        torch.distributed.destroy_process_group()

if __name__=='__main__': main()
