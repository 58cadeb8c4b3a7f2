"""Features: the parts of a model."""

from random import Random

from tests.fuzz.features import BLOCK, Draft, feature

SEQUENCE = "sequence"
CLASSES = "classes"

# Stems: what becomes of a batch's inputs, (B, WIDTH) or (B, LENGTH, WIDTH).


@feature("token embedding", slot="stem", gives=[SEQUENCE, "tokens"])
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randint(0, OUT, (LENGTH,), generator=g)"
    draft.make_stem = "nn.Embedding(OUT, WIDTH)"
    draft.sequence = True


@feature("positions and tokens", slot="stem", gives=[SEQUENCE])
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randint(0, OUT, (LENGTH,), generator=g)"
    draft.make_stem = "nn.Embedding(OUT, WIDTH)"
    draft.init.append("self.positions = nn.Embedding(LENGTH, WIDTH)")
    draft.stem = ["h = self.stem(x) + self.positions(torch.arange(x.shape[1], device=x.device))"]
    draft.sequence = True


@feature("sequence of features", slot="stem", gives=[SEQUENCE])
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randn(LENGTH, WIDTH, generator=g, dtype=DTYPE)"
    draft.sequence = True


@feature("image and convolution", slot="stem")
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randn(2, 6, 6, generator=g, dtype=DTYPE)"
    draft.make_stem = (
        "nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16, WIDTH))"
    )


@feature("convolution over time", slot="stem", gives=[SEQUENCE])
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randn(LENGTH, WIDTH, generator=g, dtype=DTYPE)"
    draft.make_stem = "nn.Conv1d(WIDTH, WIDTH, 3, padding=1)"
    draft.stem = ["h = self.stem(x.transpose(1, 2)).transpose(1, 2)"]
    draft.sequence = True


@feature("categories and numbers", slot="stem")
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = (
        "torch.cat([torch.randint(0, 5, (3,), generator=g), "
        "torch.randn(4, generator=g, dtype=DTYPE)])"
    )
    draft.make_stem = "nn.ModuleList([nn.Embedding(5, WIDTH) for _ in range(3)])"
    draft.init.append("self.numbers = nn.Linear(4, WIDTH)")
    draft.stem = [
        "h = self.numbers(x[:, 3:])",
        "for place, table in enumerate(self.stem):",
        "    h = h + table(x[:, place].long())",
    ]


@feature("bag of tokens", slot="stem")
def _(draft: Draft, random: Random) -> None:
    draft.fields["x"] = "torch.randint(0, OUT, (5,), generator=g)"
    draft.make_stem = "nn.EmbeddingBag(OUT, WIDTH, mode='sum')"


@feature("recurrent stem", slot="stem", gives=["recurrent"])
def _(draft: Draft, random: Random) -> None:
    kind = random.choice(["GRU", "LSTM"])
    draft.fields["x"] = "torch.randn(LENGTH, WIDTH, generator=g, dtype=DTYPE)"
    draft.make_stem = f"nn.{kind}(WIDTH, WIDTH, batch_first=True)"
    draft.stem = ["h = self.stem(x)[0][:, -1]"]


@feature("frozen features", slot="stem", gives=["frozen"])
def _(draft: Draft, random: Random) -> None:
    draft.make_stem = "nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).requires_grad_(False)"
    draft.stem = random.choice(
        [["with torch.no_grad():", "    h = self.stem(x)"], ["h = self.stem(x)"]]
    )


@feature("no stem", slot="stem")
def _(draft: Draft, random: Random) -> None:
    draft.make_stem = "nn.Identity()"


# Blocks.


def _block(draft: Draft, source: str, name: str = "Block") -> None:
    draft.classes[name] = source


@feature("blocks of one layer", slot="block")
def _(draft: Draft, random: Random) -> None:
    act = random.choice(["torch.relu", "torch.tanh", "F.gelu", "F.silu"])
    _block(
        draft,
        f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias={random.choice([True, False])})

    def forward(self, h):
        return h + {act}(self.layer(h))
""",
    )


@feature("normed blocks", slot="block")
def _(draft: Draft, random: Random) -> None:
    norm = random.choice(["nn.LayerNorm(WIDTH)", "nn.RMSNorm(WIDTH)"])
    _block(
        draft,
        f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = {norm}
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, h):
        return h + self.layers(self.norm(h))
""",
    )


@feature("gated blocks", slot="block")
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, h):
        return h + self.down(F.silu(self.gate(h)) * self.up(h))
""",
    )


@feature("blocks with a scale", slot="block")
def _(draft: Draft, random: Random) -> None:
    shape = random.choice(["()", "WIDTH", "1"])
    _block(
        draft,
        f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full(({shape},) if {shape} != () else (), 0.5))

    def forward(self, h):
        return h + self.scale * self.down(torch.tanh(self.up(h)))
""",
    )


@feature("attention", slot="block", needs=[SEQUENCE], gives=["attends"])
def _(draft: Draft, random: Random) -> None:
    causal = random.choice([True, False])
    _block(
        draft,
        f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        n = self.norm(h)
        q, k, v = (
            layer(n).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal={causal})
        return h + self.out(mixed.transpose(1, 2).flatten(2))
""",
    )


@feature("attention and layers", slot="block", needs=[SEQUENCE], gives=["attends"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h):
        B, S, C = h.shape
        q, k, v = self.qkv(self.norm1(h)).split(C, dim=2)
        q, k, v = (t.view(B, S, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(B, S, C))
        return h + self.down(F.gelu(self.up(self.norm2(h))))
""",
    )


@feature("attention of torch", slot="block", needs=[SEQUENCE], gives=["attends"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, h):
        n = self.norm(h)
        return h + self.attention(n, n, n, need_weights=False)[0]
""",
    )


@feature("transformer layers of torch", slot="block", needs=[SEQUENCE], gives=["attends"])
def _(draft: Draft, random: Random) -> None:
    first = random.choice([True, False])
    draft.classes["Block"] = (
        "def Block():\n    return nn.TransformerEncoderLayer("
        f"WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first={first})\n"
    )


@feature("convolution blocks", slot="block", needs=[SEQUENCE])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h):
        return h + torch.relu(self.conv(h.transpose(1, 2))).transpose(1, 2)
""",
    )


@feature("recurrent blocks", slot="block", needs=[SEQUENCE], gives=["recurrent"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, h):
        return h + self.cell(h)[0]
""",
    )


@feature("soft mixture", slot="block", gives=["experts"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, h):
        weights = self.router(h).softmax(-1)
        return h + sum(weights[..., i : i + 1] * e(h) for i, e in enumerate(self.experts))
""",
    )


@feature("routed experts", slot="block", gives=["experts", "routed"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        f"""
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return self.down(torch.tanh(self.up(h)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, h):
        flat = h.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk({random.choice([1, 2])}, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, place, None] * expert(flat[rows]))
        return h + out.view_as(h)
""",
    )


@feature("experts in tensors", slot="block", gives=["experts"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.2)
        self.w2 = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.2)

    def forward(self, h):
        weights = self.router(h).softmax(-1)
        hidden = torch.tanh(torch.einsum("...d,edf->...ef", h, self.w1))
        return h + torch.einsum("...e,...ef,efd->...d", weights, hidden, self.w2)
""",
    )


@feature("weight norm in blocks", slot="block", gives=["parametrized"])
def _(draft: Draft, random: Random) -> None:
    norm = random.choice(["weight_norm", "orthogonal"])
    _block(
        draft,
        f"""
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.utils.parametrizations.{norm}(nn.Linear(WIDTH, WIDTH).to(DTYPE))

    def forward(self, h):
        return h + 0.5 * torch.tanh(self.layer(h))
""",
    )


@feature("spectral norm in blocks", slot="block", gives=["parametrized", "buffers", "iterates"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH).to(DTYPE)
        self.layer = torch.nn.utils.parametrizations.spectral_norm(layer)

    def forward(self, h):
        return h + torch.tanh(self.layer(h))
""",
    )


@feature("blocks of two inputs", slot="block", conflicts=["sequential"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, first):
        return h + self.out(torch.relu(self.mix(torch.cat([h, first], dim=-1))))
""",
    )
    draft.blocks = ["first = h", "for block in self.blocks:", "    h = block(h, first)"]


@feature("blocks that return a dict", slot="block", conflicts=["sequential"])
def _(draft: Draft, random: Random) -> None:
    _block(
        draft,
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, state):
        h = state["h"]
        return {"h": h + torch.tanh(self.layer(h)), "depth": state["depth"] + 1}
""",
    )
    draft.blocks = [
        "state = {'h': h, 'depth': 0}",
        "for block in self.blocks:",
        "    state = block(state)",
        "h = state['h'] / state['depth']",
    ]


# How blocks are kept and called.


@feature("blocks in a Sequential", slot="container", gives=["sequential"])
def _(draft: Draft, random: Random) -> None:
    draft.make_blocks = "nn.Sequential(*[Block() for _ in range(4)])"
    draft.blocks = ["h = self.blocks(h)"]


@feature("blocks in a ModuleDict", slot="container", gives=["sequential"])
def _(draft: Draft, random: Random) -> None:
    draft.make_blocks = 'nn.ModuleDict({f"layer{i}": Block() for i in range(4)})'
    draft.blocks = ["for block in self.blocks.values():", "    h = block(h)"]


@feature("blocks as attributes", slot="container", gives=["sequential"])
def _(draft: Draft, random: Random) -> None:
    draft.make_blocks = "None"
    draft.init.append("self.a, self.b, self.c, self.d = (Block() for _ in range(4))")
    draft.blocks = ["h = self.d(self.c(self.b(self.a(h))))"]


@feature("a backbone of its own class", slot="container", gives=["sequential"], order=2)
def _(draft: Draft, random: Random) -> None:
    draft.classes.setdefault("Block", BLOCK)
    draft.classes["Backbone"] = """
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h):
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)
"""
    draft.make_blocks = "Backbone()"
    draft.blocks = ["h = self.blocks(h)"]


@feature("eight blocks", slot="container")
def _(draft: Draft, random: Random) -> None:
    draft.make_blocks = "nn.ModuleList([Block() for _ in range(8)])"


@feature("a block called twice", slot="container")
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append("self.blocks[2] = self.blocks[1]")


@feature("blocks with one weight in common", slot="container", conflicts=["block"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append("self.blocks[3].up.weight = self.blocks[0].up.weight")


@feature("blocks of unlike widths", slot="container", conflicts=["block"])
def _(draft: Draft, random: Random) -> None:
    draft.classes["Block"] = """
class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(h)))
"""
    draft.make_blocks = "nn.ModuleList([Block(inner) for inner in (16, 3, 16, 5)])"


@feature("checkpointed blocks", gives=["checkpointed"], conflicts=["sequential", "block"])
def _(draft: Draft, random: Random) -> None:
    reentrant = random.choice([True, False, False])
    draft.blocks = [
        "for block in self.blocks:",
        f"    h = checkpoint(block, h, use_reentrant={reentrant})",
    ]


@feature("a block left out now and then", slot="calling", conflicts=["sequential", "block"])
def _(draft: Draft, random: Random) -> None:
    draft.blocks = [
        "for number, block in enumerate(self.blocks):",
        "    if number != 2 or batch_idx % 2 == 1:",
        "        h = block(h)",
    ]


# What stands beside blocks.


@feature("last norm", slot="norm")
def _(draft: Draft, random: Random) -> None:
    norm = random.choice(
        ["LayerNorm(WIDTH)", "RMSNorm(WIDTH)", "LayerNorm(WIDTH, elementwise_affine=False)"]
    )
    draft.init.append(f"self.norm = nn.{norm}")
    draft.after_blocks.append("h = self.norm(h)")


@feature("group norm", slot="norm", conflicts=[SEQUENCE])
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.norm = nn.GroupNorm(2, WIDTH)")
    draft.after_blocks.append("h = self.norm(h)")


@feature(
    "batch norm",
    slot="norm",
    gives=["batch norm", "buffers", "of whole batch"],
    conflicts=[SEQUENCE, "accumulates", "uneven"],
)
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.norm = nn.BatchNorm1d(WIDTH)")
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).append("h = self.norm(h)")
    draft.trainer["sync_batchnorm"] = "devices > 1"


@feature("batch norm in evaluation", slot="norm", gives=["buffers"], conflicts=[SEQUENCE])
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.norm = nn.BatchNorm1d(WIDTH)")
    draft.after_blocks.append("h = self.norm(h)")
    draft.hook("on_train_epoch_start(self)", "self.norm.eval()")
    draft.hook("on_train_batch_start(self, batch, batch_idx)", "self.norm.eval()")


@feature("parameter on the module")
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))")
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).append("h = h + self.shift")


@feature("temperature without dimensions")
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.temperature = nn.Parameter(torch.tensor(1.5))")
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).append(
        "h = h * self.temperature"
    )


@feature("matrix on the module")
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.mixing = nn.Parameter(torch.eye(WIDTH) + 0.01)")
    draft.after_blocks.append("h = h @ self.mixing")


@feature("branch of even batches", gives=["unused"], conflicts=["resumed in mid-epoch"])
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.branch = nn.Linear(WIDTH, WIDTH)")
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).extend(
        ["if batch_idx % 2 == 0:", "    h = h + self.branch(h)"]
    )


@feature("branch made after the head", gives=["unused"], conflicts=["resumed in mid-epoch"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append("self.late = nn.Linear(WIDTH, WIDTH)")
    lines = ["h = h + self.late(h)"]
    if random.random() < 0.5:
        lines = ["if batch_idx % 2 == 0:", "    h = h + self.late(h)"]
    draft.before_blocks.extend(lines)


@feature("branch that the second batch is the first to use", gives=["unused", "used late"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append("self.rare = nn.Linear(WIDTH, WIDTH)")
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).extend(
        ["if batch_idx % 2 == 1:", "    h = h + self.rare(h)"]
    )


@feature("layer that nothing uses", gives=["unused"])
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.idle = nn.Linear(WIDTH, 3)")


@feature("frozen layer", gives=["frozen"])
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)")
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).append(
        "h = h + torch.tanh(self.fixed(h))"
    )


@feature("frozen block", gives=["frozen"], conflicts=["container", "zero grad kept"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init.append(f"self.blocks[{random.choice([0, 1, 3])}].requires_grad_(False)")


@feature("frozen biases", gives=["frozen"])
def _(draft: Draft, random: Random) -> None:
    draft.late_init += [
        "for name, p in self.named_parameters():",
        "    if name.endswith('bias'):",
        "        p.requires_grad_(False)",
    ]


@feature("long skip", gives=["long skip"])
def _(draft: Draft, random: Random) -> None:
    draft.before_blocks.append("early = h")
    draft.after_blocks.append("h = h + early")


@feature("layer used before and after")
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.twice = nn.Linear(WIDTH, WIDTH)")
    draft.before_blocks.append("h = torch.tanh(self.twice(h))")
    draft.after_blocks.append("h = self.twice(h)")


@feature("fixed dropout")
def _(draft: Draft, random: Random) -> None:
    draft.classes["kept"] = '''
def kept(h, x):
    """Return a mask of zeros and twos that follows from each sample."""
    seeds = x.double().flatten(1).sum(1).reshape(-1, *[1] * (h.dim() - 1))
    numbers = torch.arange(h.shape[-1], dtype=torch.float64, device=h.device)
    return 2 * ((seeds * 7.3 + numbers * 1.7).sin() > 0).to(h.dtype)
'''
    getattr(draft, random.choice(["before_blocks", "after_blocks"])).append("h = h * kept(h, x)")


@feature("counting buffer", gives=["buffers"])
def _(draft: Draft, random: Random) -> None:
    draft.init.append("self.register_buffer('calls', torch.zeros((), dtype=torch.long))")
    draft.step.insert(0, "self.calls += 1")


@feature("constant buffer", gives=["buffers"])
def _(draft: Draft, random: Random) -> None:
    persistent = random.choice([True, False])
    draft.init.append(
        f"self.register_buffer('offset', torch.linspace(0, 1, WIDTH), persistent={persistent})"
    )
    draft.before_blocks.append("h = h + self.offset")


@feature("tied blocks and head by transposing", slot="head")
def _(draft: Draft, random: Random) -> None:
    draft.make_head = "nn.Linear(OUT, WIDTH, bias=False)"
    draft.head = ["return F.linear(h, self.head.weight.T)"]


# Heads.


@feature("tied head", slot="head", needs=["tokens"], gives=["tied"])
def _(draft: Draft, random: Random) -> None:
    bias = random.choice([True, False])
    draft.make_head = f"nn.Linear(WIDTH, OUT, bias={bias})"
    draft.late_init.append("self.head.weight = self.stem.weight")


@feature("stem's weight as head", slot="head", needs=["tokens"])
def _(draft: Draft, random: Random) -> None:
    draft.make_head = "None"
    draft.head = [
        random.choice(
            ["return h @ self.stem.weight.T", "return F.linear(h, self.stem.weight) / 2.0"]
        )
    ]


@feature("head of two layers", slot="head")
def _(draft: Draft, random: Random) -> None:
    draft.make_head = "nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, OUT))"


@feature("heads in a ModuleDict", slot="head")
def _(draft: Draft, random: Random) -> None:
    draft.make_head = 'nn.ModuleDict({"a": nn.Linear(WIDTH, OUT), "b": nn.Linear(WIDTH, OUT)})'
    draft.head = ["return self.head['a'](h) + 0.5 * self.head['b'](h).tanh()"]


@feature("heads by turns", slot="head", gives=["unused"])
def _(draft: Draft, random: Random) -> None:
    draft.make_head = "nn.ModuleList([nn.Linear(WIDTH, OUT) for _ in range(2)])"
    draft.head = ["return self.head[batch_idx % 2](h)"]


# Averages copy the module, which torch refuses of old weight norms that had a gradient.
@feature(
    "weight-normed head", slot="head", gives=["parametrized"], conflicts=["averaging callback"]
)
def _(draft: Draft, random: Random) -> None:
    kind = random.choice(["parametrizations.weight_norm", "weight_norm"])
    draft.make_head = f"torch.nn.utils.{kind}(nn.Linear(WIDTH, OUT))"


@feature("mean over positions", needs=[SEQUENCE], order=2)
def _(draft: Draft, random: Random) -> None:
    draft.sequence = False
    draft.after_blocks.append("h = h.mean(1)")


@feature("bilinear head", slot="head")
def _(draft: Draft, random: Random) -> None:
    draft.make_head = "nn.Bilinear(WIDTH, WIDTH, OUT)"
    draft.head = ["return self.head(h, h.tanh())"]


@feature("dropped gradients", gives=["detached"])
def _(draft: Draft, random: Random) -> None:
    draft.before_blocks.append("h = 0.5 * h + 0.5 * h.detach()")


@feature("nested module of parameters")
def _(draft: Draft, random: Random) -> None:
    draft.init.append(
        "self.scales = nn.ParameterDict({'a': torch.ones(WIDTH), 'b': torch.full((1,), 0.5)})"
    )
    draft.before_blocks.append("h = h * self.scales['a'] + self.scales['b']")


@feature("list of parameters")
def _(draft: Draft, random: Random) -> None:
    draft.init.append(
        "self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])"
    )
    draft.after_blocks.append("h = h * self.gains[0] + self.gains[1]")
