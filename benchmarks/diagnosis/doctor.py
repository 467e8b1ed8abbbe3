"How often `fp16_doctor` warns about models that fail in fp16, and about others, and how many training steps it takes"
import importlib.metadata,importlib.util,logging,statistics,time,warnings
from collections import Counter
from functools import partial
import torch
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from fastai.basics import DataLoader,DataLoaders,Learner,default_device,nn,set_seed
    from fastai_amp16.all import AdamW16
from benchmarks.shared import markdown
from benchmarks.shared.hostile import zoo
from benchmarks.shared.machine import machine
from benchmarks.shared.script import parser,store
from benchmarks.shared.timing import StepTimer,quartiles

# %% architectures with fresh weights, on noise: functions that make a learner, by name
def learner(model, x, bs=4, **kwargs):
    data = list(zip(x, torch.arange(len(x))%10))
    dls = DataLoaders(DataLoader(data, bs=bs), DataLoader(data, bs=bs), device=default_device())
    return Learner(dls, model, nn.CrossEntropyLoss(), AdamW16, **kwargs)
def images(model, size, n=4): return learner(model, torch.randn(n, 3, size, size))

def _torchvision(name, size, kwargs):
    from torchvision import models
    return images(getattr(models, name)(num_classes=10, **kwargs), size)
def _timm(name, size, kwargs):
    from timm import create_model
    return images(create_model(name, pretrained=False, num_classes=10, **kwargs), size)
def named(make, size, names, **kwargs): return {o: partial(make, o, size, kwargs) for o in names.split()}

class Classes(nn.Module):
    "A classifier on the mean output of a network of transformers, for images or for tokens with padding on the right"
    def __init__(self, body, x, both=False):
        super().__init__()
        self.body,self.both = body,both
        with torch.no_grad(): self.head = nn.Linear(self.features(x).shape[1], 10)
    def features(self, x):
        if x.dim()==4:
            h = self.body(pixel_values=x)[0]
            return h.flatten(2).mean(2) if h.dim()==4 else h.mean(1)
        there = x!=1
        h = self.body(input_ids=x, attention_mask=there.long(), **(dict(decoder_input_ids=x) if self.both else {}))[0]
        return (h*there[...,None]).sum(1)/there.sum(1, keepdim=True) if len(h)==len(x) and h.shape[1]==x.shape[1] else h.mean(1)
    def forward(self, x): return self.head(self.features(x))

class ZeroShot(nn.Module):
    "CLIP, which tells to which of ten texts an image is nearest"
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer('texts', tokens(10))
    def forward(self, x): return self.body(pixel_values=x, input_ids=self.texts, attention_mask=(self.texts!=1).long()).logits_per_image

def tokens(n=4, length=16):
    x = torch.randint(4, 64, (n, length))
    x[1,-3:] = x[3,-5:] = 1
    return x

small = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64,
             pad_token_id=1, bos_token_id=2, eos_token_id=3)
def _transformers(name, size, kwargs, common=small):
    from transformers import AutoConfig,AutoModel
    config = AutoConfig.for_model(name, **{**common, **kwargs})
    body = AutoModel.from_config(config)
    if name=='clip': return images(ZeroShot(body), size)
    x = torch.randn(4, 3, size, size) if size else tokens()
    return learner(Classes(body.eval(), x, config.is_encoder_decoder).train(), x)

layers = dict(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
              decoder_ffn_dim=64)
t5 = dict(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4)
patches = dict(small, image_size=32, patch_size=8)
windows = dict(image_size=32, patch_size=4, embed_dim=16, depths=[1,1], num_heads=[2,2])
def text(names, **kwargs): return named(_transformers, 0, names, **kwargs)
def vision(names, **kwargs): return named(partial(_transformers, common={}), 32, names, **kwargs)

healthy = dict(
    torchvision={**named(_torchvision, 32, 'resnet18 regnet_y_400mf efficientnet_b0 mobilenet_v3_small shufflenet_v2_x0_5'),
        **named(_torchvision, 64, 'squeezenet1_1')},
    timm={**named(_timm, 32, '''efficientnet_b0 mixnet_s mnasnet_100 mobilenetv2_050 tinynet_e lcnet_050
            regnetx_002 regnety_002 regnetz_005 mobilenetv3_small_050 mobilenetv4_conv_small_050 ghostnet_050 rexnet_100 hardcorenas_a
            resnet10t resnet18 seresnet18 seresnext26ts gcresnext26ts ecaresnet26t resnest14d nf_regnet_b0 test_nfnet
            ese_vovnet19b_slim cs3darknet_s hgnetv2_b0 dla46_c repghostnet_050 repvit_m0_9 starnet_s050 fasternet_t0
            convnext_atto convnextv2_atto convnext_zepto_rms edgenext_xx_small inception_next_atto mambaout_femto
           '''),
        **named(_timm, 64, '''xcit_nano_12_p8_224 xcit_tiny_12_p16_224 levit_128s deit_tiny_patch16_224
            vit_tiny_patch16_224 convit_tiny mixer_s32_224 gmlp_ti16_224 resmlp_12_224 eva02_tiny_patch14_224
            test_vit_relpos pit_ti_224 visformer_tiny coat_lite_tiny''', img_size=64),
        **named(_timm, 64, 'swinv2_tiny_window8_256', window_size=2, img_size=64), **named(_timm, 64, 'swinv2_cr_tiny_224', img_size=64),
        **named(_timm, 64, 'coatnet_pico_rw_224 maxvit_pico_rw_256', img_size=64),
        **named(_timm, 64, 'efficientvit_b0 fastvit_t8 mobilevit_xxs mobilevitv2_050 pvt_v2_b0 swiftformer_xs')},
    transformers={**text('''albert bert bloom canine convbert ctrl deberta-v2 distilbert electra ernie falcon fnet gpt2 gpt_neox mamba
            mpt mra nystromformer olmo openai-gpt persimmon phi rembert roformer rwkv xlm yoso deepseek_v3'''),
        **text('llama gemma gemma2 gemma3_text qwen2 qwen3 mixtral stablelm cohere', num_key_value_heads=2, head_dim=8),
        **text('opt', ffn_dim=64, word_embed_proj_dim=32), **text('gptj codegen', rotary_dim=4),
        **text('squeezebert', embedding_size=32), **text('longformer', attention_window=4),
        **text('gpt_neo', attention_types=[[['global','local'],1]], num_layers=2, num_heads=4, window_size=4),
        **text('reformer', attention_head_size=8, axial_pos_shape=[4,4], axial_pos_embds_dim=[16,16], feed_forward_size=64,
            attn_layers=['local','lsh'], local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=2, is_decoder=False),
        **text('bart mbart pegasus m2m_100', **layers), **text('t5 mt5 switch_transformers', **t5),
        **named(partial(_transformers, common=dict(vocab_size=64, d_model=32)), 0, 'xlnet', n_layer=2, n_head=4, d_inner=64),
        **named(partial(_transformers, common=patches), 32, 'vit deit beit clip_vision_model siglip_vision_model dinov2 dinov3_vit'),
        **named(_transformers, 32, 'clip', text_config=small, vision_config=patches, projection_dim=16),
        **vision('swin swinv2', window_size=4, **windows), **vision('convnext', hidden_sizes=[16,32], depths=[1,1], num_stages=2)})

# %% models that fail in fp16: the trainings of hostile.py, architectures with masks or padding that fp16 cannot hold, and short hazards
class Hazard(nn.Module):
    "A model with `f` between two layers; the last token of each sample is 0, and the largest number is `top`"
    def __init__(self, f, top=1.):
        super().__init__()
        self.body,self.f,self.top,self.head = nn.Linear(8, 8),f,top,nn.Linear(8, 10)
    def forward(self, x):
        x = self.body(x)
        x = torch.cat([x[:,:-1]*(self.top/x.detach().abs().max().item()), torch.zeros_like(x[:,-1:])], 1)
        return self.head(self.f(x)).mean(1)
def hazard(f, **kwargs): return lambda: learner(Hazard(f, **kwargs), torch.randn(4, 6, 8))

def ahead(x): return torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1)
hazards = {'`masked_fill` of -1e9': hazard(lambda x: (x@x.mT).masked_fill(ahead(x), -1e9).softmax(-1)@x),
    'a mask of -1e9 is added': hazard(lambda x: ((x@x.mT)+ahead(x).to(x.dtype)*-1e9).softmax(-1)@x),
    '`x/(x.norm()+1e-8)`': hazard(lambda x: x/(x.norm(dim=-1, keepdim=True)+1e-8)),
    '`F.normalize`': hazard(lambda x: nn.functional.normalize(x, dim=-1)),
    'RMS norm, squares of 300': hazard(lambda x: x*(x.square().mean(-1, keepdim=True)+1e-5).rsqrt(), top=300.),
    'RMS norm, squares of 60': hazard(lambda x: x*(x.square().mean(-1, keepdim=True)+1e-5)**-0.5, top=60.),
    'variance, of 300': hazard(lambda x: (x-x.mean(-1, keepdim=True))/(x.var(-1, keepdim=True)+1e-5).sqrt(), top=300.),
    'a gate after activations of 3e3': hazard(lambda x: x*x.mean(1, keepdim=True).sigmoid(), top=3e3),
    'a gate after activations of 5e4': hazard(lambda x: x*x.mean(1, keepdim=True).sigmoid(), top=5e4),
    'logsumexp of 20': hazard(lambda x: x-x.exp().sum(-1, keepdim=True).log(), top=20.)}

def swin_v2():
    from torchvision.models import swin_transformer as swin
    return images(swin.SwinTransformer([4,4], 16, [1,1], [2,2], [5,5], num_classes=10, block=swin.SwinTransformerBlockV2,
                                       downsample_layer=swin.PatchMergingV2), 32)

hostile = dict(trainings={k: partial(s.make, 0) for k,s in zoo.items()}, hazards=hazards,
    torchvision={'Swin v2': swin_v2}, # pads windows with zeros, for which `F.normalize` computes 0/0
    transformers={**text('deberta'), **text('longt5', **t5)}) # `masked_fill` with the minimum of float32, and a mask of -1e10

# %% time
class Encoder(nn.Module):
    def __init__(self, d=64, depth=6):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 4, 2*d, 0., batch_first=True)
        self.emb,self.enc,self.head = nn.Embedding(64, d),nn.TransformerEncoder(layer, depth, enable_nested_tensor=False),nn.Linear(d, 10)
    def forward(self, x): return self.head(self.enc(self.emb(x)).mean(1))
def mlp(d=128): return nn.Sequential(nn.Linear(64, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 10))

def resnet18():
    from torchvision import models
    return models.resnet18(num_classes=10)
timed = {'ResNet-18, 32 × 32': (resnet18, lambda n: torch.randn(n, 3, 32, 32)),
         'transformer, 6 blocks': (Encoder, lambda n: torch.randint(64, (n, 16))), 'MLP, 3 layers': (mlp, lambda n: torch.randn(n, 64))}

def in_steps(name, steps, rounds):
    "The time of `fp16_doctor`, in steps of a fit in fp16 that takes turns with it, after one call to warm up"
    model,data = timed[name]
    res = []
    for i in range(rounds+1):
        learn = learner(model(), data(16*steps), bs=16, cbs=StepTimer()).to_fp16_dynamic()
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-4)
        step = statistics.median(learn.step_timer.steps())
        start = time.perf_counter()
        learn.fp16_doctor()
        if i: res.append((time.perf_counter()-start)/step)
    return quartiles(res)

# %% the result
def look(kind, group, name, make):
    "The worst finding of the doctor about a model: its severity, and the fact"
    set_seed(0, reproducible=True)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        found = [o for o in make().fp16_doctor() if o.module is not None] # findings about the model, not about optimizer and device
    worst = next(iter(found), None)
    return dict(kind=kind, group=group, name=name, worst=worst.severity if worst else None, fact=worst.fact if worst else None)

_severities = 'error','warning','info'
def table(res):
    "A Markdown table with a row for each group of models"
    def line(kind, group):
        rows = [r for r in res['rows'] if (r['kind'],r['group'])==(kind,group)]
        counts = [sum(r['worst']==s for r in rows) for s in (*_severities,None)]
        return kind,group,len(rows),*counts
    head = 'models','from','examined','error','warning','info','no finding'
    return markdown.table(head, (line(*o) for o in dict.fromkeys((r['kind'],r['group']) for r in res['rows'])), 'llr')
def alarms(res):
    "The healthy models with a warning or an error, and the hostile ones without, in words"
    false,missed = ([f"`{r['name']}` ({r['group']})" for r in rows] for rows in (warned(res, 'healthy'),warned(res, 'hostile', False)))
    return f"False alarms: {', '.join(false) or 'none'}. Hostile models without a warning: {', '.join(missed) or 'none'}."
def warned(res, kind, bad=True):
    "The rows of models that are `healthy` or `hostile`, with a warning or an error (or without, if not `bad`)"
    return [r for r in res['rows'] if r['kind']==kind and (r['worst'] in _severities[:2])==bad]
def claim(res):
    "How often the doctor is right, in a sentence"
    healthy,hostile = (sum(r['kind']==k for r in res['rows']) for k in ('healthy','hostile'))
    false = f'{n} of' if (n := len(warned(res, 'healthy'))) else 'none of the'
    return (f"`fp16_doctor` warns about {len(warned(res, 'hostile'))} of {hostile} models that are hostile to fp16, and about "
            f"{false} {healthy} healthy ones")
def times(res):
    "Markdown: the time of the doctor in training steps, by model"
    return '\n'.join(f"- {k}: {q[1]:.0f} steps" for k,q in res['in_steps'].items())

def section(res):
    of_each = markdown.listed(f'{n} of {o}' for o,n in Counter(r['group'] for r in res['rows'] if r['kind']=='healthy').items())
    return f"""### The doctor

{claim(res)}.

{alarms(res)} `to_fp16_dynamic` keeps the norm in `rms` in fp32 because of its name, and `tiny_loss` needs nothing but a loss scale.
The others fit into fp16 in the one batch that the doctor runs. What only a later batch meets, the fit finds then, without losing it.

The models have fresh weights, and get a batch of noise. Findings about optimizer and device do not count. The healthy models are {of_each}.
The hostile ones are the trainings of [hostile.py](shared/hostile.py), hazards of a few lines, and three architectures that fail in fp16
(DeBERTa, LongT5, Swin v2). {markdown.ran(res, markdown.versions(res['libraries']))}

After a first call, the doctor takes as long as this many training steps of the same model in fp16:

{times(res)}"""

def main(args=None):
    p = parser(__file__, __doc__, steps=(4,'steps of the fits that the doctor is compared with'), rounds=(3,'how often each is timed'))
    p.add_argument('--only', nargs='*', default=[], help='groups or names of models; by default all')
    a = p.parse_args(args)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING) # transformers logs a lot
    have = {o: importlib.metadata.version(o) for o in ('torchvision','timm','transformers') if importlib.util.find_spec(o)}
    rows = []
    for kind,groups in dict(healthy=healthy, hostile=hostile).items():
        for group,models in groups.items():
            models = {k:v for k,v in models.items() if not a.only or group in a.only or k in a.only}
            if group in ('torchvision','timm','transformers') and group not in have:
                if models: print(f'{group} is not installed: its {len(models)} {kind} models are left out.')
                continue
            rows += [look(kind, group, *o) for o in models.items()]
    in_time = {k: in_steps(k, a.steps, a.rounds) for k in timed if not a.only or k in a.only}
    res = dict(machine=machine(), libraries=have, rows=rows, in_steps=in_time)
    print(table(res), alarms(res), times(res), sep='\n\n')
    store(res, a.out)

if __name__=='__main__': main()
