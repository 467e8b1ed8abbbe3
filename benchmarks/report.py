"Makes benchmarks/README.md from the JSON files of the benchmarks: every number of a result comes from them"
import json,re,textwrap
from pathlib import Path
from benchmarks.accuracy import convergence,epsilon,published,scale_policy,short_fits,silent,survival
from benchmarks.compatibility import compatibility,libraries
from benchmarks.diagnosis import diagnosis,doctor
from benchmarks.memory import accumulation,memory
from benchmarks.shared.script import results
from benchmarks.speed import bf16_cpu,compiled,cuda_dispatch,fp16_cpu,gpu,scaling,step_cost

here = Path(__file__).parent

# group: script, whose `section` makes Markdown of its results: the question that it answers
contents = {
    'Accuracy': {
        short_fits: 'Do short fits end where fp32 ends?',
        convergence: 'Do whole trainings end where fp32 ends?',
        epsilon: "Which eps of Adam's trains best?",
        published: 'What happens to published failures in fp16? (needs transformers and timm)',
        silent: 'Is half precision noticed where it is finite but wrong?',
        survival: 'Which difficult trainings and events does a fit survive?',
        scale_policy: 'Which policy moves the loss scale best? (`--record` records new gradients)'},
    'Speed': {
        step_cost: 'How long does a step take?',
        compiled: 'How long does a step of a compiled model take?',
        cuda_dispatch: 'How many kernels does a forward pass launch on a GPU? (needs no GPU)',
        scaling: 'How does the cost grow with the number of tensors and their size?',
        gpu: 'How fast are whole trainings on a GPU, and how much memory do they take?',
        bf16_cpu: 'How fast is bf16 on a CPU?',
        fp16_cpu: 'How slow are fp16 convolutions on a CPU?'},
    'Memory': {
        memory: 'How much memory does a training take on a CPU?',
        accumulation: 'How much memory does gradient accumulation take?'},
    'Diagnosis and healing': {
        diagnosis: 'What do reports and healing cost?',
        doctor: 'Does `fp16_doctor` warn about the right models?'},
    'Compatibility': {
        compatibility: "Do fastai's own notebooks pass in half precision?",
        libraries: 'Do programs that use other libraries run?'}}

def stored(script): return json.loads(results(script.__file__).read_text())

def _link(title):
    "To a section of the page"
    anchor = re.sub(r'[^\w -]', '', title.lower()).replace(' ', '-')
    return f'[{title}](#{anchor})'

def _intro(sections):
    rows = []
    for group,scripts in contents.items():
        rows.append(f'| **{_link(group)}** | | |')
        for script,question in scripts.items():
            path,titles = Path(script.__file__).relative_to(here),re.findall('^### (.*)', sections[script], re.M)
            rows.append(f"| `{path}` | {question} | {', '.join(map(_link, titles))} |")
    rows = '\n'.join(rows)
    return f"""<!-- made by benchmarks/report.py -->
# Benchmarks

How close does `to_fp16_dynamic` stay to fp32, and what does it cost? Each section begins with the result, and then says how it was
measured. Where a goal was missed, it says so. All times and memory were measured on a CPU, except for [Whole trainings on a
GPU](#whole-trainings-on-a-gpu).

| script | question | result |
| --- | --- | --- |
{rows}

To run a benchmark in a clone of this repository, and to update this page:

```bash
uv run python benchmarks/accuracy/short_fits.py
uv run python benchmarks/report.py
```

Each script writes a JSON file with its name, and some also draw a chart. All results on this page come from these files.

How times are compared:

- All contenders take turns in one process, so that changes in the speed of the machine affect all of them.
- Times are medians, with quartiles in parentheses. A ratio is the median of the ratios within each round.
- On a CPU, fastai's own classes run with `'cpu'` in place of their hard-coded `'cuda'` ([fastais.py](shared/fastais.py))."""

def _wrapped(block):
    "Wraps the lines of a paragraph or a list; leaves tables, code, headings and pictures as they are"
    if re.match(r'[|`!<#]', block) and not re.match(r'`[^`]', block): return block
    parts = re.split(r'\n(?=- )', block)
    width = dict(width=140, break_long_words=False, break_on_hyphens=False)
    return '\n'.join(textwrap.fill(re.sub(r'\s+', ' ', o), subsequent_indent='  '*o.startswith('- '), **width) for o in parts)

def make():
    "The text of benchmarks/README.md"
    sections = {o: o.section(stored(o)) for scripts in contents.values() for o in scripts}
    parts = [_intro(sections)]
    for group,scripts in contents.items(): parts += [f'## {group}', *map(sections.get, scripts)]
    return '\n\n'.join(map(_wrapped, re.split(r'\n{2,}', '\n\n'.join(parts))))+'\n'

if __name__=='__main__': (here/'README.md').write_text(make())
