"""Decode over caches: pairs of heads, whole units of 16 bits, long whole units, bulk copies. On one H200, at most 60 s:

    BASE_TREE=/tree/before B_TREE=/tree/with/bulk C_TREE=/tree/with/fixed timeout 75 python3 scripts/time_decode.py            # checks, then times
    ... --only times|checks

Best as two runs, first --only checks, then --only times: each takes less than a minute, and the second finds what the
first has compiled. In one run the last cells may run out of time (DEADLINE).

Each variant in a process of its own that compiles, checks and times when told, so a hang costs only its own rows:
  base   tree BASE_TREE (left out where that is not set)
  dec5   this tree: pairs of e4m3 heads of 64 (PAIRED_KEYS), a CTA for each of many short units of 16-bit caches
  w4     this tree without CTAs of one warp: whole units by four warps
  wide   this tree, one CTA of eight warps on an SM for one sequence, whatever the kind of cache (deepest ring)
  long   this tree, whole units (a CTA each, handed out by the hardware) up to 8,192 keys, by four warps
  bulk   tree B_TREE (default: this folder and "_b"): rows of 16-bit caches of 128 and 256 columns by the TMA unit
  blong  bulk and long
  fixed  tree C_TREE (default: this folder and "_c"): fixed shares take every splits-th tile, and start to copy early
  fwide  fixed and wide
  lone   16 bits: d128 one CTA of eight warps on an SM (132 units at a time, not 264); d256 a ring of two steps, not three
  flat   this tree, scales of a token side by side for all heads, as gpu_dec3.py had them (the record has them by head)
  fa3    FlashAttention-3 as the benchmark calls it
Columns: us, median of rounds in turns; "x" is copy / variant (goal 0.900, and no less than fa3's).
"""
import argparse, json, math, os, select, statistics, subprocess, sys, time, types
import tempfile

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CELLS = [  # kind, head_dim, batch, keys, heads_q, heads_k, variants beside base, dec5 and fa3
    ("fp8", 64, 128, 1024, 32, 32, "w4 flat"), ("fp8", 64, 16, 8192, 32, 32, "long"), ("fp8", 64, 1, 131072, 32, 32, "wide fixed"),
    ("fp8", 64, 128, 8192, 64, 8, "long"), ("fp8", 64, 128, 1024, 64, 8, "flat"), ("fp8", 64, 16, 8192, 64, 8, ""),
    ("fp8", 128, 1, 131072, 64, 8, "wide fixed fwide"), ("fp8", 256, 1, 131072, 32, 32, "wide fixed fwide"), ("fp8", 128, 128, 1024, 32, 32, "flat"),
    ("bf16", 64, 128, 1024, 64, 8, "w4"), ("bf16", 64, 1, 131072, 64, 8, "wide fixed fwide"),
    ("bf16", 256, 128, 8192, 64, 8, "long bulk blong lone"), ("bf16", 256, 16, 8192, 32, 32, "long bulk blong lone"),
    ("bf16", 128, 128, 8192, 64, 8, "long bulk blong lone"), ("bf16", 128, 16, 8192, 32, 32, "long bulk blong lone"),
    ("bf16", 256, 1, 131072, 32, 32, "bulk lone fixed"), ("bf16", 256, 128, 1024, 64, 8, "bulk"), ("bf16", 128, 128, 1024, 64, 8, "bulk"),
    ("fp8", 128, 1, 8192, 64, 8, "fixed"), ("bf16", 64, 1, 8192, 64, 8, "fixed"),  # of L2, as a graph repeats them
]
VARIANTS = ("base", "dec5", "w4", "wide", "long", "bulk", "blong", "lone", "fixed", "fwide", "flat", "fa3")
SHARDS = {"base": 3, "dec5": 7, "bulk": 3, "fixed": 3}  # processes that compile
DEADLINE = 57.0
ROUNDS = 4


def used_by(cell):
    return [n for n in VARIANTS if n in ("base", "dec5", "fa3") or n in cell[6].split()]


# ---------------------------------------------------------------- worker
def patch(name):
    import dataclasses
    from cute_attn import decode_plan as dp
    if name in ("w4", "long", "blong"):
        dp.narrow = lambda config: None
    if name in ("long", "blong"):
        dp.WHOLE_KEYS = 8192
    if name in ("wide", "fwide"):
        dp.wide = lambda c: dp._deepest(c, 8, 1) if c.arch == "sm_90a" and c.lean else None
    chosen = dp.chosen
    if name in ("bulk", "blong"):
        def by_bulk(config, *shape):
            if not config.fp8 and config.lean and config.head_dim >= 128 and config.head_dim_v >= 128:
                config = dp._deepest(dataclasses.replace(config, bulk=True), config.warps, dp.ctas_per_sm(config), 2)
            return chosen(config, *shape)
        dp.chosen = by_bulk
    if name == "lone":
        def lone(config, *shape):
            if not config.fp8 and config.lean and config.head_dim == 128:
                config = dp._deepest(config, 8, 1)
            if not config.fp8 and config.lean and config.head_dim == 256:
                config = dataclasses.replace(config, stages=2)
            return chosen(config, *shape)
        dp.chosen = lone


def filled(shape, dtype, make):
    """A random block of 2^24 elements again and again: quick, and nothing in memory depends on what it holds."""
    import torch
    x = torch.empty(shape, device="cuda", dtype=dtype)
    flat = x.view(-1)
    n = min(flat.numel(), 1 << 24)
    block = make(n).to(dtype)
    for i in range(0, flat.numel(), n):
        flat[i : i + n].copy_(block[: flat.numel() - i])
    return x


def cell_call(cell, flat, seed):
    import torch
    kind, d, batch, keys, hq, hk = cell[:6]
    g = torch.Generator(device="cuda").manual_seed(seed)
    q = torch.randn(batch, 1, hq, d, device="cuda", generator=g).bfloat16()
    out, options = [q], dict(cache_seqlens=torch.full((batch,), keys, device="cuda", dtype=torch.int32))
    for mean in (0.0, 0.5):
        size, dtype = (80, torch.float8_e4m3fn) if kind == "fp8" else (1, torch.bfloat16)
        make = lambda n: ((torch.randn(n, device="cuda", generator=g) + mean) * size).clamp(-448, 448)
        out.append(filled((batch, keys, hk, d), dtype, make))
    if kind == "fp8":
        for name in ("k_descale", "v_descale"):
            scale = torch.rand(batch, hk, keys, device="cuda", generator=g) * 0.02 + 0.005
            scale = scale.transpose(1, 2)  # those of a head lie one behind another, as in KVCache and the benchmark
            options[name] = scale.contiguous() if flat else scale
    return (*out, options)


def wrong(got, q, k, v, options):
    """What float64 says of a few heads of the first and last sequence: None if that is right."""
    import torch
    batch, group = len(q), q.shape[2] // k.shape[2]
    for b in sorted({0, batch - 1}):
        for h in sorted({0, 1, k.shape[2] - 1}):
            x, y = k[b, :, h].double(), v[b, :, h].double()
            if "k_descale" in options:
                x, y = x * options["k_descale"][b, :, h, None].double(), y * options["v_descale"][b, :, h, None].double()
            rows = q[b, 0, h * group : (h + 1) * group].double()
            exact = torch.softmax(rows @ x.T / math.sqrt(q.shape[3]), -1) @ y
            error = (got[b, 0, h * group : (h + 1) * group].double() - exact).abs().max().item()
            bound = 1.5 * 2**-7 * exact.abs().max().item()
            if not error <= bound:
                return f"sequence {b} head {h}: error {error:.3g}, bound {bound:.3g}"
    return None


def graph_of(call, count):
    import torch
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            kept = call()
    return graph, kept


def time_graph(graph, count, seconds=0.009):
    import torch
    def once(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(n):
            graph.replay()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e3 / n / count
    us = once(1)
    n = max(1, int(seconds * 1e6 / 3 / (us * count)))
    return statistics.median(once(n) for _ in range(3))


def tests():
    sys.path.insert(0, os.path.join(HERE, "tests"))
    import test_decode_gpu
    return test_decode_gpu


def own_cases(t, name):
    C = t.Case
    long = (8192, 0, 1, 17, 4096, 63, 5000, 8000, 64, 65, 2, 7777, 300, 8192, 1023, 1024)
    many = tuple(i * 37 % 1025 for i in range(128))
    if name == "fixed":
        O = lambda n, **k: C("fixed_" + n, k.pop("lengths", (30000,)), slots=k.pop("slots", 32768), heads=k.pop("heads", (64, 8)), **k)
        return [
            *(O(f"16bit_{d}", dims=(d, d)) for d in (64, 128, 256)),
            *(O(f"e4m3_{d}", dims=(d, d), scales="token") for d in (64, 128, 256)),
            O("pairs", dims=(64, 64), scales="token", heads=(32, 32)), O("short", lengths=(40,), slots=1024),
            O("none", lengths=(0,), slots=1024, scales="token"), O("ends", seqlen_q=2, heads=(32, 8), options={"causal": True}),
            O("window", options={"window_size": (5000, 0)}), O("pad", leftpad=True, batch_idx=True, sinks=True, scales="token"),
            O("one_head", lengths=(131072,), slots=131072, scales="token", heads=(8, 1)), O("tiny", lengths=(7,), slots=40),
        ]
    if name == "bulk":
        return [
            *(C(f"balanced{d}", long, slots=8192, heads=(64, 8), dims=(d, d)) for d in (128, 256)),
            C("balanced_mha", long, slots=8192, heads=(32, 32)),
            *(C(f"one{d}", (30000,), slots=32768, heads=(64, 8), dims=(d, d)) for d in (128, 256)),
            C("one_none", (0,), slots=1024, heads=(64, 8)), C("one_short", (40,), slots=1024, heads=(64, 8)),
            C("splits", long, slots=8192, heads=(64, 8), options={"num_splits": 3}),
            C("few_tokens", long, slots=8192, seqlen_q=2, heads=(32, 8), options={"causal": True}),
            C("window", long, slots=8192, heads=(64, 8), options={"window_size": (700, 0)}),
            C("all", long, slots=8192, heads=(64, 8), batch_idx=True, leftpad=True, sinks=True, alibi=True),
            *(C(f"many{d}", many, slots=1024, heads=(64, 8), dims=(d, d)) for d in (128, 256)),
            C("many_dims", many, slots=1024, heads=(64, 8), dims=(128, 256)),
            C("many_tiny", tuple(i % 40 for i in range(128)), slots=48, heads=(64, 8)),
            C("many_pad", many, slots=1024, heads=(64, 8), leftpad=True, batch_idx=True),
        ]
    P = lambda n, lengths=(1000, 0, 517), **k: C("pair_" + n, lengths, dims=k.pop("dims", (64, 64)), scales="token", **k)
    return [
        *(P(f"{q}_{k}", heads=(q, k)) for q, k in ((2, 2), (8, 2), (10, 2), (16, 2))),
        P("balanced", long, slots=8192, heads=(32, 32)), P("balanced_full", long, slots=8192, heads=(64, 8)),
        P("one", (30000,), slots=32768, heads=(32, 32)), P("one_full", (30000,), slots=32768, heads=(64, 8)),
        P("v32", dims=(64, 32), heads=(8, 8)), P("k32", dims=(32, 64), heads=(8, 4)), P("32", dims=(32, 32), heads=(8, 4)),
        P("sizes", magnitudes=(1e-3, 1e4), heads=(16, 2)), P("few", seqlen_q=4, heads=(8, 4), options={"causal": True}),
        P("window", heads=(8, 4), options={"window_size": (100, 0)}), P("all", heads=(8, 4), sinks=True, leftpad=True, batch_idx=True),
        P("scores", heads=(8, 4), alibi=True, options={"softcap": 20.0}),
        P("many", many, slots=1024, heads=(32, 32)), P("many_full", many, slots=1024, heads=(64, 8)),
        P("many_tiny", tuple(i % 40 for i in range(128)), slots=48, heads=(32, 32)),
        *(C(f"short16_{d}", many, slots=1024, heads=(64, 8), dims=(d, d)) for d in (64, 128, 256)),
        C("short16_mha", many, slots=1024, heads=(32, 32), dims=(64, 64)),
        C("short16_tiny", tuple(i % 40 for i in range(128)), slots=48, heads=(64, 8), dims=(64, 64), sinks=True),
        C("short16_pad", many, slots=1024, heads=(64, 8), leftpad=True, batch_idx=True),
        C("short16_rows", many, slots=1024, seqlen_q=4, heads=(32, 8), options={"causal": True}),
    ]


def check_all(say, limit, name):
    """Against float64, again, in graphs with other lengths and beside one another."""
    import torch
    t = tests()
    from cute_attn import decode, flash_attn_with_kvcache
    own = own_cases(t, name)
    begin, done = time.time(), 0

    def poison_free():
        x = [torch.full((1 << 24,), math.nan, device="cuda"), *(torch.full((n,), math.nan, device="cuda") for n in (64, 4096, 1 << 18))]
        del x

    for case in own:
        if time.time() - begin > limit:
            say(f"checks cut short before {case.name}: {done} of {len(own)}")
            return
        print(json.dumps({"at": case.name}), flush=True)
        decode._plans = type(decode._plans)()
        q, k, v, options = case.make()
        on_device = torch.tensor(case.lengths, device="cuda", dtype=torch.int32)
        poison_free()
        call = lambda: flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
        got = call()
        [plan] = decode._plans.values()
        try:
            config = plan.config
            if plan.prefill is not None:
                say(f"{case.name}: a forward kernel takes it, so the check tells nothing new")
            pairs = case.name.startswith("pair") or case.name in ("fixed_e4m3_64", "fixed_pairs")
            assert config.heads == (2 if pairs else 1), config.name
            assert config.whole == (("many" in case.name or "short16" in case.name)), config.name
            assert name != "bulk" or config.bulk, config.name
            assert name != "fixed" or config.fixed or case.name == "fixed_tiny", config.name
            t.check(got, q, k, v, case, **{**options, "cache_seqlens": on_device})
            for _ in range(4):
                poison_free()
                assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, call())), "not the same again"
            graphs = [graph_of(call, 3) for _ in range(2)]
            streams = [torch.cuda.Stream() for _ in graphs]
            torch.cuda.synchronize()
            for _ in range(3):  # beside one another, and eager calls beside them
                for s, (g, _) in zip(streams, graphs):
                    with torch.cuda.stream(s):
                        g.replay()
                again = call()
            torch.cuda.synchronize()
            for other in (again, *(x for _, x in graphs)):
                assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, other)), "not the same beside others"
            if "window_size" not in case.options:
                lengths = options["cache_seqlens"]
                for f in (lambda x: x * 0, lambda x: x * 5 // 9, lambda x: x.clamp_max(1) if len(x) < 100 else x // 30, lambda x: on_device):
                    new = f(on_device)
                    lengths.copy_(torch.maximum(new, options["cache_leftpad"]) if "cache_leftpad" in options else new)
                    graphs[0][0].replay()
                    t.check(graphs[0][1], q, k, v, case, **options)
        except AssertionError as error:
            say(f"WRONG {case.name}: {error}"[:300])
            continue
        done += 1
    say(f"checks: {done} of {len(own)} right, {time.time() - begin:.1f} s")


def worker(name, shard):
    import torch
    from cute_attn import decode_plan
    patch(name)
    say = lambda what: print(json.dumps(what), flush=True)
    if shard is not None:  # only compile, for the disk cache
        from cute_attn.compile import compile_kernel
        configs = []
        mine = ("w4", "wide", "long", "lone") if name == "dec5" else ("blong",) if name == "bulk" else ("fwide",) if name == "fixed" else ()
        clean = decode_plan.narrow, decode_plan.wide, decode_plan.chosen, decode_plan.WHOLE_KEYS
        for other in (name, *mine):
            if other != name:
                decode_plan.narrow, decode_plan.wide, decode_plan.chosen, decode_plan.WHOLE_KEYS = clean
                patch({"blong": "long"}.get(other, other))  # of bulk chosen is by bulk already
            for cell in CELLS:
                if other in used_by(cell):
                    kind, d, batch, keys, hq, hk = cell[:6]
                    form = dict(cache="e4m3", scales="token") if kind == "fp8" else {}
                    c = decode_plan.decode_config(d, d, "bf16", rows=hq // hk, **form)
                    configs.append(decode_plan.chosen(c, batch, hk, hq // hk, keys, 0, 132, None)[0])
        decode_plan.narrow, decode_plan.wide, decode_plan.chosen, decode_plan.WHOLE_KEYS = clean
        if name in ("dec5", "bulk", "fixed") and ARGS.only != "times":
            decode_plan.PAIRED_KEYS = 0
            t = tests()
            for case in own_cases(t, name):
                rows = case.seqlen_q * case.heads[0] // case.heads[1]
                splits = case.options.get("num_splits", 0)
                configs.append(decode_plan.chosen(case.config(), len(case.lengths), case.heads[1], rows, case.slots, splits, 132, None)[0])
        configs = list(dict.fromkeys(configs))
        for c in configs[shard[0] :: shard[1]]:
            compile_kernel(c)
        return
    say("up")
    state = None
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "checks":
            before, decode_plan.PAIRED_KEYS = decode_plan.PAIRED_KEYS, 0
            check_all(lambda text: say({"note": text}), rest[0], name)
            decode_plan.PAIRED_KEYS = before
            torch.cuda.empty_cache()
            say("done")
        elif what == "cell":
            state = None
            torch.cuda.empty_cache()
            cell = rest[0]
            try:
                q, k, v, options = cell_call(cell, name == "flat", int(time.time() * 1000) % 1000000)
                size = 2 * k.numel() * k.element_size() + 4 * sum(options[n].numel() for n in options if n.endswith("descale"))
                count = max(1, min(64, int(3e-4 / (size / 4e12 + 5e-6))))
                label, bad = "", None
                if name == "fa3":
                    from cute_attn.bench import decode as bench, peers
                    case = types.SimpleNamespace(batch=cell[2], seqlen_k=cell[3], heads_k=cell[5], causal=False)
                    attend = bench._fa3(peers.Contender("fa3", cell[0], "decode"), case, q, k, v, None, ())[0]
                    call = lambda: attend(k, v)
                    graph, _ = graph_of(call, count)
                else:
                    from cute_attn import decode, flash_attn_with_kvcache
                    decode._plans = type(decode._plans)()
                    call = lambda: flash_attn_with_kvcache(q, k, v, **options)
                    graph, kept = graph_of(call, count)
                    [plan] = decode._plans.values()
                    label = f"{plan.config.name.split('_d%d_' % cell[1])[1]} {plan.shares.ctas}/{plan.shares.splits}"
                    graph.replay()
                    bad = wrong(kept, q, k, v, options)
                copy = None
                if name == "dec5":
                    src = torch.empty(size // 32 * 16, dtype=torch.uint8, device="cuda").random_()
                    dst = torch.empty_like(src)
                    copy = graph_of(lambda: dst.copy_(src), count)[0]
                    rest.append((src, dst))
                state = graph, copy, count, (q, k, v, options, call, rest)
                say([label, size, bad])
            except Exception as error:  # noqa: BLE001 - of a peer, too: its row is left out
                say(["", 0, f"{type(error).__name__}: {error}"[:200]])
        elif what == "time":
            say(time_graph(state[1] if rest[0] else state[0], state[2]) if state else None)
        elif what == "free":
            state = None
            torch.cuda.empty_cache()


# ---------------------------------------------------------------- parent
class Worker:
    def __init__(self, name, tree, env):
        self.name, self.dead, self.at = name, False, ""
        self.p = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", name],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=tree, bufsize=1)
    def tell(self, *what):
        if not self.dead:
            try:
                self.p.stdin.write(json.dumps(what) + "\n"); self.p.stdin.flush()
            except OSError:
                self.stop("is gone")
    def stop(self, why):
        if not self.dead:
            print(f"{self.name}: {why} {self.at}", flush=True)
            self.dead = True
            self.p.kill()
    def hear(self, seconds):
        while not self.dead:
            ready, _, _ = select.select([self.p.stdout], [], [], seconds)
            if not ready:
                self.stop("HANGS"); return None
            line = self.p.stdout.readline()
            if not line:
                self.stop("ended"); return None
            try:
                got = json.loads(line)
            except ValueError:
                continue
            if isinstance(got, dict) and "at" in got:
                self.at = "at " + got["at"]
                continue
            if isinstance(got, dict):
                print(f"{self.name}: {got['note']}", flush=True)
                continue
            return got


def main():
    start = time.time()
    left = lambda: DEADLINE - (time.time() - start)
    only = ARGS.only
    b_tree, c_tree = os.environ.get("B_TREE", HERE + "_b"), os.environ.get("C_TREE", HERE + "_c")
    trees = {n: {"base": os.environ.get("BASE_TREE"), "bulk": b_tree, "blong": b_tree, "fixed": c_tree, "fwide": c_tree}.get(n, HERE) for n in VARIANTS}
    names = [n for n in VARIANTS if trees[n] and os.path.isdir(trees[n])]
    if only == "checks":
        names = [n for n in names if n in ("dec5", "bulk", "fixed")]
    envs = {}
    for n in names:
        link = os.path.join(trees[n], "cute_attn", "kernels")
        if not os.path.lexists(link):
            os.symlink("../kernels", link)
        cache = {"base": "base", "bulk": "b", "blong": "b", "fixed": "c", "fwide": "c"}.get(n, "tree")
        envs[n] = {**os.environ, "PYTHONPATH": trees[n], "CUTE_ATTN_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"decode_cache_{cache}")}
    extra = ["--only", only] if only else []
    jobs = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--worker", n, "--shard", f"{i},{k}", *extra],
                             env=envs[n], cwd=trees[n], stdout=subprocess.DEVNULL)
            for n, k in SHARDS.items() if n in names for i in range(k)]
    workers = {n: Worker(n, trees[n], envs[n]) for n in names}  # they load their modules meanwhile
    for j in jobs:
        try:
            if j.wait(timeout=max(1, min(30, left()))):
                print("a compilation failed:", j.args[3:], flush=True)
        except subprocess.TimeoutExpired:
            print("a compilation takes too long:", j.args[3:], flush=True)
            j.kill()
    print(f"compiled after {time.time() - start:.1f} s", flush=True)
    for w in workers.values():
        w.hear(30)
    if only != "times":
        checked = [n for n in ("dec5", "bulk", "fixed") if n in names]
        for n in checked:
            workers[n].tell("checks", 30.0 if only else 12.0)
        for n in checked:
            workers[n].hear(10)  # so long between two messages at most
            if workers[n].dead and only != "checks" and n == "dec5":
                workers[n] = Worker(n, trees[n], envs[n])
                workers[n].hear(30)
        print(f"checked after {time.time() - start:.1f} s", flush=True)
    if only != "checks":
        print("kind  d  batch x keys, heads          MB    copy " + " ".join(f"{n:>14s}" for n in names))
        for cell in CELLS:
            if left() < 3:
                print("out of time"); break
            used = [n for n in names if n in used_by(cell) and not workers[n].dead]
            kernels, size = {}, 0
            for n in used:
                workers[n].tell("cell", cell)
            for n in list(used):
                got = workers[n].hear(15)
                if got is None or not got[1]:
                    print(f"{n}: no time of {cell[:6]}: {got and got[2]}", flush=True)
                    used.remove(n)
                    continue
                kernels[n] = got[0]
                size = max(size, got[1])
                if got[2]:
                    print(f"{n}: WRONG {cell[:6]}: {got[2]}", flush=True)
            times, copies = {n: [] for n in used}, []
            for r in range(ROUNDS):
                turn = r % max(1, len(used))
                for n in used[turn:] + used[:turn]:
                    workers[n].tell("time", 0)
                    got = workers[n].hear(8)
                    if got:
                        times[n].append(got)
                if "dec5" in used and not workers["dec5"].dead:
                    workers["dec5"].tell("time", 1)
                    got = workers["dec5"].hear(8)
                    if got:
                        copies.append(got)
            for n in used:
                workers[n].tell("free")
            copy = statistics.median(copies) if copies else math.nan
            row = ""
            for n in names:
                us = statistics.median(times[n]) if times.get(n) else None
                row += f" {us:7.1f} {copy / us:5.3f}x" if us else " " * 15
            kind, d, batch, keys, hq, hk = cell[:6]
            print(f"{kind:4s} {d:3d} {batch:3d} x {keys:6d} {hq:2d}/{hk:2d}       {size / 1e6:6.0f} {copy:7.1f} {row}", flush=True)
            print("      " + ", ".join(f"{n} {k}" for n, k in kernels.items() if k), flush=True)
    for w in workers.values():
        w.p.kill()
    print(f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker"); parser.add_argument("--shard"); parser.add_argument("--only", choices=("times", "checks"))
    ARGS = parser.parse_args()
    if ARGS.worker is not None:
        worker(ARGS.worker, None if ARGS.shard is None else tuple(map(int, ARGS.shard.split(","))))
    else:
        main()
