"""Published failures in fp16, each with its link: where such fits end, which faults are named, and what stays in fp32

The code comes from transformers and timm. The models are tiny, with random weights. In the middle of a fit, the weights change so
that the numbers of the report occur in the module that it names."""
import importlib,importlib.metadata,importlib.util,re,statistics,types,warnings
from collections import namedtuple
from itertools import chain,islice,repeat
import torch
from benchmarks.accuracy import trainings # noqa: F401 (first: it hides a warning of fastai's import)
from fastai.basics import Callback,DataLoaders,nn,set_seed
from fastai_amp16.ask import training_case
from benchmarks.shared import hostile,markdown
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import Batches

needs = 'transformers','timm'
steps,at = 15,7 # steps of a fit; the step, counted from 0, before which the weights change
near = 0.02 # a fit ends "where fp32 ends" if its validation loss is at most this far from that of fp32, relative to it

# %% models
d,words = 32,12 # width, and size of the vocabulary

class Headed(nn.Module):
    "A linear layer on top of `call(body, inputs)`"
    def __init__(self, body, call, ni=d, c=4):
        super().__init__()
        self.body,self.head,self.call = body,nn.Linear(ni, c),call
    def forward(self, x): return self.head(self.call(self.body, x))

def mean_token(body, x, **kwargs): return body(input_ids=x, attention_mask=(x!=0).long(), **kwargs).last_hidden_state.mean(1)
def copied(body, x): return mean_token(body, x, decoder_input_ids=x)

def hf(name, call=mean_token, **kwargs):
    "A function that makes a model of transformers for sentences, with the configuration `kwargs`"
    def make():
        import transformers
        cls = getattr(transformers, name)
        ids = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0, attn_implementation='eager')
        return Headed(cls(cls.config_class(**dict(ids, vocab_size=words, **kwargs))), call)
    return make

def t5(name, **kwargs): return hf(name, d_model=d, d_kv=16, d_ff=2*d, num_heads=2, num_layers=2, dropout_rate=0., **kwargs)
def bart(name, **kwargs):
    sides = {f'{o}_{k}': v for o in ('encoder','decoder') for k,v in dict(layers=2, ffn_dim=2*d, attention_heads=2).items()}
    return hf(name, copied, d_model=d, dropout=0., max_position_embeddings=16, decoder_start_token_id=0, use_cache=False, **sides, **kwargs)
def llama(name, **kwargs):
    return hf(name, hidden_size=d, intermediate_size=2*d, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
              use_cache=False, **kwargs)
def bert(name, **kwargs): return llama(name, hidden_dropout_prob=0., attention_probs_dropout_prob=0., **kwargs)

def mt5():
    "A model whose only dropout is the one at fault, whose inputs must stay below 65504"
    model = t5('MT5EncoderModel', feed_forward_proj='gated-gelu')()
    model.body.encoder.block[1].layer[1].dropout.p = 0.1
    return model

def pegasus():
    "A model whose only dropout is the one at fault, as in `mt5`"
    model = bart('PegasusModel')()
    model.body.encoder.layers[1].dropout = 0.1
    return model

def vae_decoder():
    "The decoder of Janus' VQ-VAE, which has the same blocks as the VAE of Stable Diffusion, which transformers does not have"
    from transformers.models.janus.configuration_janus import JanusVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAEDecoder
    config = JanusVQVAEConfig(latent_channels=4, base_channels=d, channel_multiplier=[1,1], num_res_blocks=1, dropout=0.)
    return Headed(JanusVQVAEDecoder(config), lambda body,x: body(x).flatten(1), 3*4*4)

def timm(module, name, **kwargs):
    "A function that makes a model of timm for small images"
    def make(): return getattr(importlib.import_module(f'timm.models.{module}'), name)(num_classes=4, **kwargs)
    return make

def vit():
    model = timm('vision_transformer', 'VisionTransformer', img_size=16, patch_size=4, embed_dim=d, depth=2, num_heads=2)()
    for b in model.blocks: b.attn.fused_attn = False
    return model

def efficientvit():
    "EfficientViT before timm computed its attention in fp32"
    model = timm('efficientvit_mit', 'EfficientVit', widths=(8,8,8,16), depths=(1,1,1,1), head_dim=8, head_widths=(16,16))()
    def attn(self, q, k, v):
        out = q@(k.transpose(-1, -2)@v)
        return out[...,:-1]/(out[...,-1:]+self.eps)
    for m in model.modules():
        if type(m).__name__=='LiteMLA': m._attn = types.MethodType(attn, m)
    return model

# %% data
def latents(n): return hostile.classes(n, (4,2,2))
def images(n, size=16): return hostile.classes(n, (3,size,size))

# %% faults: each takes a model and the inputs of a fit, and returns a function that changes the weights
def peaks(tops):
    "Scales the parameters of modules until their largest outputs are those in `tops`, which has names in order of execution"
    def top(model, m, x):
        found = []
        with m.register_forward_hook(lambda m,args,out: found.append(out.abs().max().item())), torch.no_grad(): model.eval()(x)
        model.train()
        return found[0]
    def times(m, factor):
        for p in m.parameters(): p.data *= factor
    def fault(model, x):
        factors = {}
        for n,o in tops.items():
            m = model.get_submodule(n)
            factors[m] = o/top(model, m, x)
            times(m, factors[m])
        for m,f in factors.items(): times(m, 1/f)
        def change():
            for m,f in factors.items(): times(m, f)
        return change
    return fault

def offset(rows, value):
    "Sets some elements of queries and keys to `value` for all tokens: the scores get large, the softmax stays the same; `rows` by layer"
    def fault(model, x):
        def change():
            for n,o in rows.items():
                m = model.get_submodule(n)
                weight = m.weight.data if isinstance(m, nn.Linear) else m.weight.data.T # GPT-2's `Conv1D`
                weight[o],m.bias.data[o] = 0,value
        return change
    return fault

def no_channel(model, x):
    "Sets a channel of the queries to 0"
    def change():
        m = model.blocks[1].attn.qkv
        m.weight.data[3],m.bias.data[3] = 0,0
    return change

def large_norm(model, x):
    def change(): model.body.layers[1].post_feedforward_layernorm.weight.data += 4e4
    return change

def nothing(model, x): return lambda: None

# %% the failures
hub,layer = 'https://github.com','body.encoder.block.1.layer.1.DenseReluDense'
long_t5,small_heads = t5('LongT5EncoderModel', local_radius=4),dict(num_key_value_heads=2, head_dim=16)
full = dict(layer_types=['full_attention']*2, **small_heads)
gemma_4 = dict(full, global_head_dim=16, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
apart = dict(relative_attention=True, pos_att_type=['c2p','p2c'])
def feed_forward(**tops): return peaks({f'{layer}.{k}': v for k,v in tops.items()})
def fc2(top): return peaks({'body.encoder.layers.1.fc1': 180, 'body.encoder.layers.1.fc2': top})
def q_and_k(name, value=320, **rows): return offset({f'{name}.{k}': v for k,v in rows.items()}, value)

# where: patterns of the module that a report has to name, and of the operation if it is in the module's own code
Failure = namedtuple('Failure', 'link says where make fault data lr', defaults=(nothing,hostile.sentences,1e-3))
failures = {
    'T5': Failure(f'{hub}/huggingface/transformers/issues/5651', '`wo` of a feed-forward layer outputs 66246',
        (r'.*\.DenseReluDense\.wo',''), t5('T5EncoderModel'), feed_forward(wi=180, wo=2e5)),
    'mT5': Failure('https://huggingface.co/docs/transformers/v5.9.0/debugging',
        'the dropout after a feed-forward layer whose output reaches 62700',
        (r'.*\.layer\.1\.dropout',''), mt5, feed_forward(wi_0=20, wi_1=20, wo=6.2e4), lr=1e-4),
    'LongT5': Failure(f'{hub}/huggingface/transformers/issues/17978',
        'the loss is always NaN (no module named; the code has a mask of -1e10)',
        (r'.*\.LocalSelfAttention','add'), long_t5),
    'LongT5, feed-forward': Failure(f'{hub}/huggingface/transformers/pull/19229', 'the feed-forward layer, `LongT5LayerFF`',
        (r'.*\.layer\.1(\..*)?','.*'), long_t5, feed_forward(wi=180, wo=2e5)),
    'Pegasus': Failure(f'{hub}/huggingface/transformers/issues/12225', '`PegasusEncoderLayer`, after an `fc2` that outputs 60600',
        (r'.*\.encoder\.layers\.1','dropout'), pegasus, fc2(6.2e4), lr=1e-4),
    'BART': Failure(f'{hub}/huggingface/transformers/pull/7243', 'an encoder layer would return infinity',
        (r'.*\.encoder\.layers\.1(\..*)?','.*'), bart('BartModel'), fc2(2e5)),
    'Gemma 3': Failure(f'{hub}/huggingface/transformers/issues/39972', 'the outputs of RMS norms, and their sums',
        (r'.*\.post_feedforward_layernorm','.*'), llama('Gemma3TextModel', **full), large_norm),
    'Gemma 4': Failure(f'{hub}/unslothai/unsloth-zoo/pull/600', 'the product that goes into `mlp.down_proj`',
        (r'.*\.mlp(\.down_proj)?','mul|linear'), llama('Gemma4TextModel', **gemma_4),
        peaks({f'body.layers.1.mlp.{o}_proj': 1e3 for o in ('gate','up')}), lr=3e-4),
    'Qwen2': Failure(f'{hub}/QwenLM/Qwen3/issues/910', '`Q @ K^T` of eager attention',
        (r'.*\.self_attn','matmul'), llama('Qwen2Model', num_key_value_heads=2),
        q_and_k('body.layers.1.self_attn', q_proj=[15,31], k_proj=[15,31])),
    'Phi-2': Failure(f'{hub}/huggingface/transformers/pull/28673', 'attention',
        (r'.*\.self_attn','matmul'), llama('PhiModel', attention_dropout=0., resid_pdrop=0.),
        q_and_k('body.layers.1.self_attn', q_proj=[15,31], k_proj=[15,31])),
    'GPT-NeoX': Failure(f'{hub}/huggingface/transformers/pull/30199', '`QK.T` of attention',
        (r'.*\.attention','matmul'), llama('GPTNeoXModel'), q_and_k('body.layers.1.attention', query_key_value=[15,31,63,79])),
    'GPT-2': Failure(f'{hub}/stanford-crfm/mistral/issues/67', 'the dot products of attention',
        (r'.*\.attn','matmul'),
        hf('GPT2Model', n_embd=d, n_layer=2, n_head=2, embd_pdrop=0., attn_pdrop=0., resid_pdrop=0., use_cache=False),
        q_and_k('body.h.1.attn', c_attn=[15,31,47,63])),
    'BLOOM': Failure(f'{hub}/huggingface/transformers/pull/18185', 'infinite attention scores before the softmax',
        (r'.*\.self_attention','baddbmm'), hf('BloomModel', hidden_size=d, n_layer=2, n_head=2, use_cache=False),
        q_and_k('body.h.1.self_attention', 640, query_key_value=[15,31,63,79])),
    'DeBERTa': Failure(f'{hub}/autogluon/autogluon/pull/4732', 'the attention mask: a value cannot be converted to half',
        (r'.*\.attention\.self','masked_fill'), bert('DebertaModel', **apart)),
    'mDeBERTa': Failure(f'{hub}/huggingface/transformers/pull/24116', 'an overflow in training (no module named)',
        (r'.*\.attention\.self','bmm'), bert('DebertaV2Model', position_buckets=4, share_att_key=True, **apart),
        q_and_k('body.encoder.layer.1.attention.self', query_proj=[15,31], key_proj=[15,31])),
    'SDXL VAE': Failure('https://huggingface.co/madebyollin/sdxl-vae-fp16-fix', 'activations inside the decoder are too large',
        (r'body\.(mid|up)\..*','.*'), vae_decoder, peaks({'body.up.0.block.0.conv2': 2e5}), latents, 3e-4),
    'ViT-L': Failure(f'{hub}/LTH14/mage/issues/26', 'attention',
        (r'blocks\.1\.attn','matmul'), vit, q_and_k('blocks.1.attn', 640, qkv=[15,31,47,63]), images),
    'XCiT': Failure(f'{hub}/pytorch/pytorch/issues/32137', 'the eps of `F.normalize`, 1e-12, is 0 in half precision',
        (r'blocks\.1\.attn','div|normalize'),
        timm('xcit', 'Xcit', img_size=16, patch_size=8, embed_dim=d, depth=2, num_heads=2, cls_attn_layers=1), no_channel, images),
    'EfficientViT': Failure(f'{hub}/mit-han-lab/efficientvit/issues/15', 'the matmuls and the division in attention',
        (r'.*\.context_module\.main','matmul|div'), efficientvit, peaks({'stages.2.blocks.1.context_module.main.qkv.conv': 60}),
        lambda n: images(n, 32)),
}

# %% a fit
class Changing(Batches):
    "Batches of a fit; calls `change` before the batch with number `at`"
    change = None
    def __iter__(self):
        for i,o in enumerate(super().__iter__()):
            if i==at and self.change: self.change()
            yield o

def learner(name):
    "A learner for a fit of `steps` batches, with the fault"
    f = failures[name]
    learn = hostile.learner(0, f.data, f.make, n=128, n_valid=64, bs=16)
    batches = Changing(list(islice(chain.from_iterable(repeat(learn.dls.train)), steps)))
    batches.change = f.fault(learn.model, torch.cat([x for x,_ in batches.items]))
    learn.dls,learn.lr = DataLoaders(batches, learn.dls.valid, device=learn.dls.device),f.lr
    return learn

class Healed(Callback):
    "Records each batch that is healed, with the model before it, and with what stayed in fp32 before it"
    order = 99
    def __init__(self): self.found = []
    def before_batch(self):
        if not self.training: return
        mp = self.mixed_precision
        self.now = dict(i=self.train_iter, batch=(*self.xb,*self.yb), state={k: v.clone() for k,v in self.model.state_dict().items()},
                        before=list(mp.promoted), reports=len(mp.reports))
    def after_batch(self):
        if not self.training: return
        mp,now = self.mixed_precision,self.now
        if mp.promoted!=now['before']:
            self.found.append(dict(now, new=[p for p in mp.promoted if p not in now['before']], scale=mp.history.loss_scale.iloc[-1],
                                   reports=mp.reports[now['reports']:]))

def fit(learn):
    "Fits, and returns the validation loss, computed in fp32"
    set_seed(0, reproducible=True)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, learn.lr)
        return float(learn.to_fp32().validate()[0])

def least(name, o):
    "What stays in fp32 since the batch `o`: the part that is not needed, and a set that suffices, with only the own code of some modules"
    learn = learner(name).to_fp16_dynamic(keep_fp32=o['before'], init_scale=o['scale'])
    learn.model.load_state_dict(o['state'])
    with training_case(learn, o['batch']) as case:
        case.fp32,case.silent = case.run_fp32(),case.run().finite
        def sound(keep): return case.is_sound(keep)
        keep = o['new']
        if not sound(keep): raise RuntimeError(f'{name}: what stays in fp32 is not enough for the batch that it was found with')
        spare = [p for p in keep if sound([q for q in keep if q!=p])]
        for p in keep:
            inside = not p.endswith('.') and any(True for _ in learn.model.get_submodule(p).children())
            if inside and sound(other := [p+'.' if q==p else q for q in keep]): keep = other
    return spare,keep

def weighted(model):
    "The names of linear layers and convolutions"
    return [n for n,m in model.named_modules() if isinstance(m, (nn.Linear,nn.modules.conv._ConvNd)) or type(m).__name__=='Conv1D']

def in_half(layers, promoted):
    "How many of `layers` compute in half precision"
    return sum(not any(n==p or n.startswith(p+'.') for p in promoted if not p.endswith('.')) for n in layers)

def healing(name):
    "A fit with `to_fp16_dynamic`: its callback and model, validation loss, healed batches, and the longest pause to heal, in steps"
    learn = learner(name).to_fp16_dynamic().add_cb(healed := Healed())
    batches,mp,loss = learn.dls.train,learn.mixed_precision,fit(learn)
    times,at = [b-a for a,b in zip(batches.times, batches.times[1:])],[o['i'] for o in healed.found]
    ordinary = [t for i,t in enumerate(times) if i>min(at, default=0) and not mp.history.reruns[i]]
    return mp,learn.model,loss,healed.found,max((times[i] for i in at), default=0.)/statistics.median(ordinary)

def rounding(name, promoted):
    "The validation loss of a fit in fp32 that rounds the outputs of all layers but the `promoted` ones to half precision"
    learn = learner(name)
    def rounded(m, args, out): return out+(out.half().to(out.dtype)-out).detach()
    for n in weighted(learn.model):
        if in_half([n], promoted): learn.model.get_submodule(n).register_forward_hook(rounded)
    return fit(learn)

def row(name):
    "The results for a failure"
    f,fp32,plain = failures[name],fit(learner(name)),hostile.plain_fp16(learner(name), 1, failures[name].lr)[0]
    (mp,model,loss,healed,_),*_ = runs = [healing(name) for _ in range(3)]
    layers,reports,sets = weighted(model),[r for r in mp.reports if r.producer is not None],[least(name, o) for o in healed]
    in_training = {p for o in healed for p in o['new']}
    in_validation = [p for p in mp.promoted if p not in in_training]
    enough = [p for _,keep in sets for p in keep]+in_validation
    def is_it(r): return all(re.fullmatch(pattern, what or '') for pattern,what in zip(f.where, (r.producer,r.op)))
    return dict(name=name, link=f.link, says=f.says, plain=plain, fp32=fp32, loss=loss,
        distance=abs(loss/fp32-1), rounding=abs(rounding(name, mp.promoted)/fp32-1),
        named=any(map(is_it, reports)), reports=[dict(producer=r.producer, op=r.op, text=r.sentence, promoted=r.promoted) for r in reports],
        promoted=mp.promoted, spare=[p for spare,_ in sets for p in spare],
        layers=len(layers), half=in_half(layers, mp.promoted), could_be=in_half(layers, enough),
        pause=statistics.median(pause for *_,pause in runs), reruns=mp.n_rerun, skipped=mp.n_skipped, scale=mp.scaler.get_scale())

# %% the result
def ends(r): return r['distance']<=near and not r['skipped']

def claim(rows):
    "How well the fits end, in a sentence"
    def of(f): return f'{n} of {len(rows)}' if (n := sum(map(f, rows)))<len(rows) else f'all {n}'
    return (f"With `to_fp16_dynamic`, {of(ends)} fits end where fp32 ends, {of(lambda r: r['named'])} published faults are named, and in "
            f"{of(lambda r: not r['spare'])} fits, every module that stays in fp32 is needed there")

def _span(xs): return f'{min(xs):.2g}%'+f' to {max(xs):.2g}%'*(len(xs)>1)
def _by_rounding(rows):
    "In which of the fits that end elsewhere rounding the outputs explains it, and in which it does not, in sentences"
    def of(far): return [r for r in rows if (r['rounding']>near)==far]
    def which(rs): return markdown.listed(r['name'] for r in rs),_span([100*r['rounding'] for r in rs])
    if of(True):
        names,alone = which(of(True))
        yield (f"For {names}, rounding alone leads away from fp32, too: an fp32 fit in which the outputs of the layers that stay in half "
               f"precision are rounded to it ends {alone} away.")
    if of(False):
        names,alone = which(of(False))
        yield f"For {names}, such a fit ends {alone} away, so rounding of outputs is not the cause, which we have not found."
def explained(rows):
    "What is behind the fits that end elsewhere, or that keep more in fp32 than they have to, in sentences"
    res,rest,more = [],[r for r in rows if not ends(r)],sum(r['could_be']>r['half'] for r in rows)
    if rest:
        distance = _span([100*r['distance'] for r in rest])
        res += [f"The other {len(rest)} {'end' if len(rest)>1 else 'ends'} {distance} away.",
                *_by_rounding(rest)]
    if more: res.append(f"In {more} of {len(rows)} fits, it would be enough to keep only a module's own code in fp32, without its layers.")
    return ' '.join(res)

def table(res):
    "A Markdown table"
    def line(r):
        says = failures[r['name']].says if r['name'] in failures else r['says']
        plain = r['plain'].split()[0].replace('raises', 'an error')
        what = '; '.join(f"{'`'+o['op']+'` in ' if o['op'] else ''}`{o['producer']}`" for o in r['reports'])
        far,alone = [f"{100*r[k]:.2g}%" for k in ('distance','rounding')]
        fault = what if r['named'] else f'no: {what}' if what else 'no'
        end = far if ends(r) else f'**{far}** ({alone} by rounding alone)'
        return f"[{r['name']}]({r['link']})",says,plain,end,fault,f"{r['pause']:.0f}"
    head = ('model', 'published fault', "steps skipped by PyTorch's loop", "distance from fp32's loss", 'what the diagnosis names',
            'pause, steps')
    return markdown.table(head, map(line, res['rows']), 'llrll')

def section(res):
    details = f"""- **PyTorch's loop** uses autocast and `GradScaler`.
- A fit **ends where fp32 ends** if it skips no step, and its validation loss is within {100*res['near']:g}% of the one in fp32. If not, its
  distance is bold.
- **The fault is named** if a report names the published module, and the operation if it is in the module's own code. If not, the
  table says "no".
- A module in fp32 is **needed** if the batch fails again without it.
- **Pause** is the time of the slowest step with a diagnosis, in ordinary steps.

{table(res)}

Gemma 3's norms are in fp32 from the start, so nothing fails. For Pegasus, `fc2` itself overflows here, so the diagnosis
names it, and not what follows it. For XCiT, the diagnosis names the layer that gets the large gradient of `F.normalize`, not the function.
Janus's decoder, which has the same blocks, takes the place of the SDXL VAE. Where a published report names
no module, the fault is in the one whose code overflows."""
    return f"""### Published failures

{claim(res['rows'])}. {explained(res['rows'])}

These are failures in fp16 that people have reported, rebuilt with the code of transformers and timm, in tiny models with random weights.
Before step {at+1} of {res['steps']}, the weights change so that the numbers of the report occur in the module that it names. In the end,
{markdown.span((r['half']/r['layers'] for r in res['rows']), '.0%')} of the linear layers and convolutions compute in half precision.
{markdown.ran(res, markdown.versions(res['libraries']))}

{markdown.folded('Each failure, and how to read the columns', details)}"""

def main(argv=None):
    p = parser(__file__, __doc__, only=(failures,'which failures'))
    a = p.parse_args(argv)
    if missing := [o for o in needs if not importlib.util.find_spec(o)]: p.error(f"{' and '.join(missing)} must be installed")
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        rows = [row(o) for o in a.only]
    res = dict(machine=machine(), steps=steps, near=near, libraries={o: importlib.metadata.version(o) for o in needs}, rows=rows)
    print(f'{claim(rows)}. {explained(rows)}', table(res), sep='\n\n')
    store(res, a.out)

if __name__=='__main__': main()
