"What the scripts have in common: arguments, a JSON file with the results, and new processes"
import argparse,json,os,subprocess,sys
from pathlib import Path

def results(
    script # Path of a script
) -> Path:
    "Where its results are: in a JSON file beside it, with its name"
    return Path(script).with_suffix('.json')

def _add(p, name, default, what):
    "Adds an option, whose type is that of its default"
    if isinstance(default, dict): kwargs = dict(nargs='+', choices=default, default=[*default], metavar='NAME')
    elif isinstance(default, list): kwargs = dict(nargs='+', type=type(default[0]), default=default)
    else: kwargs = dict(type=type(default), default=default)
    p.add_argument('--'+name, help=what, **kwargs)

def parser(
    script, # Path of the script
    doc:str, # Its docstring
    out:str='file for the results', # What `--out` is
    **options # By name, a default and a description; where the default is a dict, the option takes some of its keys, by default all
) -> argparse.ArgumentParser: # Has `--out` as well
    "The arguments of a script"
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name,option in options.items(): _add(p, name, *option)
    p.add_argument('--out', type=Path, default=results(script), help=out)
    return p

def store(
    res:dict, # The results
    path:Path
):
    "Writes results as JSON"
    path.write_text(json.dumps(res, indent=1)+'\n')

def in_new_process(
    script, # Path of the script
    *args # Its arguments
) -> str:
    "What a script prints in a process of its own, which gives memory back once it is free, so that its peak is what was in use"
    command = [sys.executable, '-W', 'ignore', script, *map(str, args)]
    env = {**os.environ, 'MALLOC_MMAP_THRESHOLD_': str(2**20)}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
