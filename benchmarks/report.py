"Makes benchmarks/README.md from the JSON files of the benchmarks: every number of a result comes from them"
import json,re,textwrap
from collections import Counter
from pathlib import Path
from benchmarks.accuracy import convergence,epsilon,published,scale_policy,short_fits,silent,survival
from benchmarks.compatibility import compatibility,libraries
from benchmarks.diagnosis import diagnosis,doctor
from benchmarks.memory import accumulation,memory
from benchmarks.shared import markdown
from benchmarks.shared.script import results
from benchmarks.speed import bf16_cpu,compiled,cuda_dispatch,fp16_cpu,gpu,scaling,step_cost

here = Path(__file__).parent

# group: scripts, whose `section` makes Markdown of their results
contents = {
    'Accuracy': (short_fits,convergence,epsilon,published,silent,survival,scale_policy),
    'Speed': (gpu,step_cost,compiled,cuda_dispatch,scaling,bf16_cpu,fp16_cpu),
    'Memory': (memory,accumulation),
    'Diagnosis and healing': (diagnosis,doctor),
    'Compatibility': (compatibility,libraries)}

def stored(script): return json.loads(results(script.__file__).read_text())

def _usual():
    "Where most scripts ran: the machine, and the version of fastai"
    found = [stored(o) for scripts in contents.values() for o in scripts]
    return [Counter(r[k] for r in found if k in r).most_common(1)[0][0] for k in ('machine','fastai')]

def _with_where(res, on, version):
    "Results, and in what their machine and fastai differ from the usual ones"
    parts = [o for o in res.get('machine', '').split(', ') if o not in on.split(', ')]
    if res.get('fastai', version)!=version: parts.append(f"fastai {res['fastai']}")
    return {**res, 'where': ', '.join(parts)}

def _rows(script): return stored(script)['rows']

def _on_a_gpu():
    "The line on speed and memory, if they were measured beside fp32"
    def span(key):
        over = gpu.ratios(stored(gpu), 'to_fp16_dynamic', 'fp32', key)
        return markdown.span(o for (m,_),o in over.items() if m!=gpu.only_predictions) if over else ''
    speed,peak = map(span, ('samples_per_second','peak_mib'))
    if not (speed and peak): return ''
    over = gpu.ratios(stored(gpu), 'to_fp16_dynamic', 'fp32')
    rest = markdown.span(o for (m,_),o in over.items() if m==gpu.only_predictions)
    worst = f". Only `{gpu.only_predictions}`, which computes little else than logits, is at {rest}" if rest else ''
    on = stored(gpu)['machine'].split(',')[0]+gpu.earlier(stored(gpu))
    return f"""- **On a GPU** ({on}): {speed} times as many samples per second as in fp32, with {peak} times its peak memory{worst}
  ([more](#whole-trainings-on-a-gpu)).
"""

def _results():
    "What most readers look for: a line for each group"
    def survived(kind, to): return sum(r[to] for r in _rows(survival) if r['kind']==kind)
    ours,theirs = 'to_fp16_dynamic','to_fp16'
    n_hard = sum(r['kind']=='training' for r in _rows(survival))
    ok,n,_ = silent.worst(_rows(silent), 'wrong')
    ends = sum(map(published.ends, _rows(published)))
    bf16 = markdown.span(r['ours'][1] for r in _rows(bf16_cpu))
    fp16 = markdown.span((r['slower'][ours][1] for r in _rows(fp16_cpu)), '.0f')
    paused = [r['pause'] for r in (*stored(diagnosis)['by_depth'], *_rows(published)) if r.get('reports', True)]
    cells,passed = (sum(r['passed'][o] for r in _rows(compatibility)) for o in ('plain',ours))
    programs,run = (len(libraries.ran(_rows(libraries), o)) for o in ('plain','fp16'))
    return f"""- **Whole trainings**: {convergence.claim(stored(convergence))}
  ([more](#whole-trainings)).
- **Trainings that are hard for fp16**: {survived('training', ours)} of {n_hard} end as in fp32, and {survived('training', theirs)} with
  `to_fp16` ([more](#what-survives)). Of {len(_rows(published))} failures that people have published, {ends} do
  ([more](#published-failures)).
- **Random programs that half precision makes finite but wrong**: in the worst of four settings, {ok} of {n} end as in fp32
  ([more](#finite-but-wrong)).
{_on_a_gpu()}- **On a CPU**: bf16 is {bf16} times as fast as fp32 for a transformer and an MLP, if the CPU has instructions for it
  ([more](#bf16-on-a-cpu)). In fp16, convolutional networks take {fp16} times as long as in fp32 ([more](#fp16-convolutions-on-a-cpu)).
- **Each time that layers move to fp32**, the fit pauses, for as long as {markdown.span(paused, '.0f')} steps take
  ([transformers](#healing), [other models](#published-failures)).
- **The doctor** {doctor.claim(stored(doctor)).removeprefix('`fp16_doctor` ')} ([more](#the-doctor)).
- **Compatibility**: {passed} of {cells} cells of fastai's notebooks pass ([more](#fastais-own-notebooks)), and {run} of {programs} programs
  with other libraries run ([more](#programs-of-other-libraries))."""

intro = """<!-- made by benchmarks/report.py -->
# Benchmarks

How close does `to_fp16_dynamic` stay to fp32, and what does it cost? The results first:

{results}

Most trainings and models are cases of our own. The random programs, and the models and notebooks of others, are not.

Setup, unless a section says otherwise: {machine}, fastai {fastai}. Everything that ran on a GPU ran on one {gpu}.

Contenders take turns in one process, so that changes in the speed of the machine affect all of them. Times are medians. A ratio of times
is the median of the ratios within each round, unless a section says otherwise. Each section ends with a link to its script. A JSON file
beside the script has all of its results, and quartiles of the times."""

outro = """## Scripts

To run a benchmark in a clone of this repository, and to update this page:

```bash
uv run python benchmarks/accuracy/short_fits.py
uv run python benchmarks/report.py
```

On a CPU, fastai's own classes run with `'cpu'` in place of their hard-coded `'cuda'` ([fastais.py](shared/fastais.py)). Of the scripts,
`published.py` needs transformers and timm, and `compatibility.py` a checkout of fastai."""

def _section(script, *where):
    "What a script says of its results, with a link to it below each heading's text"
    path = Path(script.__file__).relative_to(here)
    texts = re.split(r'\n\n(?=### )', script.section(_with_where(stored(script), *where)))
    return '\n\n'.join(f'{o}\n\nScript: [{path.name}]({path})' for o in texts)

def _wrapped(block):
    "Wraps the lines of a paragraph or a list; leaves tables, code, headings and pictures as they are"
    if re.match(r'[|`!<#]', block) and not re.match(r'`[^`]', block): return block
    parts = re.split(r'\n(?=- )', block)
    width = dict(width=140, break_long_words=False, break_on_hyphens=False)
    return '\n'.join(textwrap.fill(re.sub(r'\s+', ' ', o), subsequent_indent='  '*o.startswith('- '), **width) for o in parts)

def make():
    "The text of benchmarks/README.md"
    on,version = _usual()
    parts = [intro.format(results=_results(), machine=on, fastai=version, gpu=stored(gpu)['machine'].split(',')[0])]
    for group,some in contents.items(): parts += [f'## {group}', *(_section(o, on, version) for o in some)]
    return '\n\n'.join(map(_wrapped, re.split(r'\n{2,}', '\n\n'.join([*parts,outro]))))+'\n'

if __name__=='__main__': (here/'README.md').write_text(make())
