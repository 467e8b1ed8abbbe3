"Write README.md and its pictures from nbs/index.ipynb, as it stands with its outputs"
import base64,json,re
from pathlib import Path
from textwrap import fill
from fastcore.nbio import read_nb

root = Path(__file__).resolve().parent.parent

def directives(cell): return re.findall(r'^#\| *(\w+)', cell.source, re.M) if cell.cell_type=='code' else []

def alt_text(cell, heading):
    "What its picture shows, in words: as `#| fig-alt:` says, which Quarto reads as well; else the heading that it stands under"
    return ([heading]+re.findall(r'^#\| *fig-alt: *(.*)$', cell.source, re.M))[-1]

def code(cell): return '\n'.join(o for o in cell.source.splitlines() if not o.startswith('#|')).strip()

def _text(o): return ''.join(o) # notebooks hold lists of lines, or a string

def _wrapped(line):
    "A sentence in lines of 88 characters, as a box of the site holds; a row of a table as it is"
    is_row = '   ' in line.strip()
    return line if is_row or len(line)<=90 else fill(line, 88, subsequent_indent='    ', break_long_words=False)

def plain(html):
    "Tables without looks: no styles, and no attributes that only these need"
    html = re.sub(r'<style.*?</style>', '', html, flags=re.S)
    return re.sub(r'(<(?:table|thead|tbody|tr|th|td)\b)[^>]*', lambda m: m[1]+''.join(re.findall(r' (?:col|row)span="\d+"', m[0])), html)

def _shown(
    o, # What a cell put out
    picture, # Takes the bytes of a PNG, returns the path to show it by
    alt:str, # Says in words what a picture shows
    text, # What becomes of Markdown
    table # What becomes of HTML
) -> str: # Markdown: printed text and values fenced, HTML with a line for each row of a table
    data = o.get('data', {})
    if 'image/png' in data: return f"![{alt}]({picture(base64.b64decode(_text(data['image/png'])))})"
    if 'text/markdown' in data: return text(_text(data['text/markdown']))
    if 'text/html' in data:
        html = re.sub(r'\n\s*', '\n', table(_text(data['text/html'])))
        return re.sub(r'\s*\n\s*(</tr|</?t[dh])', r'\1', html).strip()
    lines = _text(o.get('text') or data.get('text/plain', '')).rstrip().split('\n')
    return '```text\n'+'\n'.join(map(_wrapped, lines))+'\n```'

gpu_results,gpu_mark = root/'benchmarks'/'gpu.json','<!-- what benchmarks/gpu.py found -->'
no_gpu = '*Not run on a GPU yet: all results here come from CPUs.*'

def on_gpu() -> str:
    "What `benchmarks/gpu.py` has found, as Markdown for `nbs/index.ipynb`, or how to find it out"
    if not gpu_results.exists():
        return "Not measured on a GPU yet. ([script](../benchmarks/gpu.py))"
    res = json.loads(gpu_results.read_text())
    def show(r, k, spec): return '–' if r.get(k) is None else format(r[k], spec)
    specs = dict(samples_per_second='.0f', over_to_fp16='.2f', peak_over_to_fp16='.2f', syncs_per_step='.1f')
    head = ['training', 'batch size', 'samples per second', "× fastai's `to_fp16`", "peak memory × `to_fp16`'s", 'synchronizations a step']
    ours = [r for r in res['rows'] if r['contender']=='to_fp16_dynamic']
    rows = [head, ['---', *['--:']*5], *([r['model'], str(r['bs']), *(show(r, k, spec) for k,spec in specs.items())] for r in ours)]
    return '\n'.join('| '+' | '.join(o)+' |' for o in rows)+f"""

`to_fp16_dynamic` on a GPU ({res['machine']}; one of the synchronizations is that of fastai's `Recorder`), and all that were compared:

![Throughput beside fastai, Lightning and Accelerate](../benchmarks/{gpu_results.with_suffix('.png').name})"""

def with_gpu(text): return (text.replace(f'{no_gpu}\n\n', '') if gpu_results.exists() else text).replace(gpu_mark, on_gpu())

def blocks(
    nb:Path, # A notebook
    picture, # As in `_shown`
    text=lambda s: s, # What becomes of Markdown
    exported=lambda cell: (), # What is shown of a cell that goes into a module: an iterable of Markdown
    table=plain # What becomes of HTML
):
    "The Markdown of a notebook, piece by piece"
    heading = ''
    for cell in read_nb(nb).cells:
        if cell.cell_type=='markdown':
            heading = ([heading]+re.findall(r'^#+ (.*)', cell.source, re.M))[-1]
            yield text(with_gpu(cell.source))
        elif cell.cell_type=='code' and not {'hide','default_exp'} & set(directives(cell)):
            if 'export' in directives(cell): yield from exported(cell)
            else:
                if 'echo' not in directives(cell) and code(cell): yield f'```python\n{code(cell)}\n```'
                yield from (_shown(o, picture, alt_text(cell, heading), text, table) for o in cell.get('outputs', []))

def make():
    "The text of README.md, and a dict from the paths of its pictures to their bytes"
    pictures = {}
    def picture(png):
        path = f'nbs/images/index-{len(pictures)+1}.png'
        pictures[path] = png
        return path
    def text(s): return re.sub(r'\]\((?!https?:|#)([^)]+)\)', r'](nbs/\1)', s).replace('](nbs/../', '](')
    return '\n\n'.join(o.strip() for o in blocks(root/'nbs'/'index.ipynb', picture, text))+'\n',pictures

if __name__=='__main__':
    text,pictures = make()
    (root/'README.md').write_text(text, encoding='utf-8')
    for o in (root/'nbs'/'images').glob('index-*.png'): o.unlink()
    for path,png in pictures.items():
        (root/path).parent.mkdir(exist_ok=True)
        (root/path).write_bytes(png)
