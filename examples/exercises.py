# %% [markdown]
# # The exercises of the three chapters
#
# The chapters "Automatic Parallelism", "Training on Multiple GPUs" and
# "Concise Implementation for Multiple GPUs" of *Dive into Deep Learning*
# (d2l.ai) end with exercises. Here is one function for each. It runs the
# experiment and prints what it found. The numbers are those of this run on
# this machine, and every conclusion is drawn from them.
#
# All of them take a few minutes on two CPU cores. These are the settings:

# %%
names = []              # such as ["aggregation", "profile"]; []: all
backend = None          # mxnet or torch; None: the installed backend
devices = 2             # the k of the exercises
size = 512              # rows and columns of the matrices
repeat = 16             # products in one run, steps of one timing
data = "digits"         # digits, fashion-mnist, synthetic, or an IDX folder
limit = None            # examples; None: all for LeNet, 96 for ResNet-18
epochs = None           # None: 5 for LeNet, 2 for ResNet-18

# %%
import inspect
import sys
import time
from types import SimpleNamespace

import numpy as np

import mgpu
from mgpu import functional as F

listed = False
if "ipykernel" not in sys.modules:  # a script: its options replace settings
    import command_line
    parser = command_line.parser_for(globals())
    parser.add_argument("exercises", nargs="*", help="which (default: all)")
    parser.add_argument("--list", action="store_true", dest="listed",
                        help="print their names and stop")
    options = vars(parser.parse_args())
    options["names"] += options.pop("exercises")
    globals().update(options)
settings = SimpleNamespace(devices=devices, size=size, repeat=repeat,
                           data=data, limit=limit, epochs=epochs)

EXERCISES = {}


def exercise(function):
    EXERCISES[function.__name__] = function
    return function


# %% [markdown]
# ## What several of them need

# %%
def seconds(devices, work, laps=3):
    """How long `work()` takes on `devices`: the shortest of `laps` laps,
    after one that is not counted. The shortest, because other programs on
    the machine only add time."""
    work()
    timer = mgpu.Timer(devices)
    for _ in range(laps):
        timer.start()
        work()
        timer.stop()
    return min(timer.times)


def matrices(devices, size=None):
    size = size or settings.size
    rng = np.random.default_rng(0)
    return [mgpu.put(rng.random((size, size), dtype=np.float32), device)
            for device in devices]


def products(x, count=None):
    return [F.dot(x, x) for _ in range(count or settings.repeat)]


def name_of(devices):
    return f"{len(devices)} device{'s' * (len(devices) != 1)}"


loss = mgpu.losses.SoftmaxCrossEntropyLoss()


def forward(X, y, params):
    if len(X):
        return loss(mgpu.models.lenet_forward(X, params), y)


def lenet_on(devices, lr, weights=None, dtype="float32"):
    """LeNet from scratch: its parameters on each device, and a function that
    trains on one batch."""
    params = mgpu.models.lenet_params(0.1, dtype=dtype)
    device_params = [mgpu.get_params(params, device) for device in devices]

    def step(X, y):
        X_shards, y_shards = mgpu.split_batch(X, y, devices, weights=weights)
        with mgpu.record():
            losses = mgpu.parallel(forward, X_shards, y_shards, device_params)
        mgpu.backward(losses)
        for i in range(len(params)):
            mgpu.allreduce([mgpu.grad(p[i]) for p in device_params])
        for p in device_params:
            mgpu.sgd(p, lr, len(X))
        return losses
    return device_params, step


def train_lenet(devices, batch_size, lr):
    """Accuracy at the end, images per second, steps per epoch; an accuracy
    of None when the loss did not stay finite."""
    train_iter, test_iter = mgpu.datasets.load(settings.data, batch_size,
                                               settings.limit)
    device_params, step = lenet_on(devices, lr)
    predict = [lambda X: mgpu.models.lenet_forward(X, device_params[0])]
    try:
        history = mgpu.train_epochs(step, train_iter, settings.epochs or 5,
                                    devices)
    except mgpu.NonFiniteLoss:
        return None, 0.0, len(train_iter)
    accuracy = mgpu.evaluate_accuracy_gpu(predict, test_iter, devices[0])
    return accuracy, max(history.images_per_second), len(train_iter)


def resnet_on(devices, lr=0.1):
    replicas = mgpu.initialize(mgpu.models.resnet18(), devices,
                               init=mgpu.initializers.Normal(0.01))
    return replicas, mgpu.Trainer(replicas, "sgd", {"learning_rate": lr})


# %% [markdown]
# ## Automatic parallelism

# %%
@exercise
def independent_operators():
    """Do independent operators of one device run in parallel?

    Eight products where each needs the one before, and eight that need
    nothing from each other. If one device ran operators in parallel, the
    second eight would be faster.
    """
    devices = mgpu.list_devices(settings.devices)
    xs = matrices(devices)

    def chain():
        y = xs[0]
        for _ in range(8):
            y = F.dot(y, xs[0])

    one = seconds(devices, lambda: mgpu.parallel(
        lambda x: products(x, 1), xs[:1]))
    chained = seconds(devices, lambda: mgpu.parallel(
        lambda x: chain(), xs[:1]))
    free = seconds(devices, lambda: mgpu.parallel(
        lambda x: products(x, 8), xs[:1]))
    share = -(-8 // len(xs))
    spread = seconds(devices, lambda: mgpu.parallel(
        lambda x: products(x, share), xs))
    for what, time_ in (
            ("one product", one), ("8 in a chain, one device", chained),
            ("8 independent, one device", free),
            (f"{share} on each of {name_of(devices)}", spread)):
        print(f"{what:30}{1e3 * time_:9.2f} ms {time_ / one:6.1f} products")
    if free < 0.75 * chained:
        print("Independent operators of one device overlapped.")
    else:
        print("One device took its operators one after the other, dependent "
              "or not: a logical CPU device is one worker thread, and a GPU "
              "works through one queue.")
    if spread < 0.75 * free:
        print(f"Spread over devices they ran {free / spread:.1f} times as "
              "fast: independence pays across devices.")
    else:
        print("Spread over devices they were hardly faster in this run; "
              "`profile` shows how many cores were busy.")


@exercise
def small_operators():
    """Does parallelism help small operators, even on one CPU or GPU?

    The same number of products, small and large: waited for one by one,
    queued on one device, and spread over several logical devices of the same
    CPU (or over the GPUs there are).
    """
    devices = mgpu.list_devices(settings.devices)
    count = 8 * settings.repeat
    print(f"microseconds per product, {count} of them:")
    print(f"{'size':>6}{'waiting for each':>18}{'one device':>12}"
          f"{name_of(devices):>12}{'gain':>7}")
    gains = {}
    for size in sorted({max(2, settings.size // 16),
                        max(2, settings.size // 4), settings.size}):
        xs = matrices(devices, size)

        def patiently(x):
            for _ in range(count):
                mgpu.to_numpy(F.dot(x, x)[:1])      # a row of it is enough

        laps = [seconds(devices, lambda: mgpu.parallel(work, on))
                for work, on in (
                    (patiently, xs[:1]),
                    (lambda x: products(x, count), xs[:1]),
                    (lambda x: products(x, -(-count // len(xs))), xs))]
        gains[size] = laps[1] / laps[2]
        print(f"{size:6}", *(f"{1e6 * lap / count:{width}.1f}"
                             for lap, width in zip(laps, (17, 11, 11))),
              f"{gains[size]:6.2f}")
    smallest, largest = min(gains), max(gains)
    print(f"Side by side, products of size {smallest} gained "
          f"{gains[smallest]:.2f}-fold, those of size {largest} "
          f"{gains[largest]:.2f}-fold.")
    if gains[smallest] > 1.1:
        print("So parallelism helped even the small ones, each of which is "
              "too little work to be divided among cores by itself.")
    else:
        print("So the small ones gained nothing here. Asking for such a "
              "product in Python can take longer than computing it, and one "
              "thread at a time runs Python: then batch them into one "
              "operator instead.")


@exercise
def compute_and_copies():
    """Compute on two devices and copy between them and the host, together.

    Three tasks: products on the first device, products on the second, and
    copies in both directions. First one after the other, then all at once.
    """
    devices = mgpu.list_devices(2)
    x1, x2 = matrices(devices)
    host = np.ones((settings.size, settings.size), dtype=np.float32)
    idle, = matrices(devices[:1])       # no product needs it or changes it

    def copies():
        for _ in range(settings.repeat):
            mgpu.to_numpy(idle)
            mgpu.put(host, devices[1])

    tasks = {f"compute on {devices[0]}": lambda: products(x1),
             f"compute on {devices[1]}": lambda: products(x2),
             "copy to the host and back": copies}
    single = []
    for what, task in tasks.items():
        single.append(seconds(devices, lambda: mgpu.parallel(
            lambda run: run(), [task])))
        print(f"{what:30}{1e3 * single[-1]:9.2f} ms")
    together = seconds(devices, lambda: mgpu.parallel(
        lambda run: run(), list(tasks.values())))
    print(f"{'all at once':30}{1e3 * together:9.2f} ms; sum "
          f"{1e3 * sum(single):.2f}, longest {1e3 * max(single):.2f}")
    print(f"At once they took {together / sum(single):.2f} of the sum; with "
          "nothing shared it would be "
          f"{max(single) / sum(single):.2f}. The three share the cores and "
          "the memory of one CPU." if devices[0].kind == "cpu" else
          f"At once they took {together / sum(single):.2f} of the sum; "
          "products use the arithmetic of the GPUs, copies the bus.")


@exercise
def profile():
    """Is the hardware busy? Check with a profiler.

    The simplest profiler that means the same on both backends: processor
    seconds of the whole process over seconds on the clock, which is how many
    cores were busy. It says nothing about a GPU: there use the vendor's tool,
    for example `nsys profile python auto_parallelism.py`.
    """
    devices = mgpu.list_devices(2)
    xs = matrices(devices)
    train_iter, _ = mgpu.datasets.load(settings.data, 128, settings.limit)
    X, y = next(iter(train_iter))
    steps = [lenet_on(devices[:1], 0.1)[1], lenet_on(devices, 0.1)[1]]
    busy = {}
    for what, work in (
            ("products, one device", lambda: mgpu.parallel(products, xs[:1])),
            ("products, two devices", lambda: mgpu.parallel(products, xs)),
            ("LeNet step, one device", lambda: steps[0](X, y)),
            ("LeNet step, two devices", lambda: steps[1](X, y))):
        work()
        timer, before = mgpu.Timer(devices), time.process_time()
        for _ in range(3):
            work()
        wall = timer.stop()
        processor = time.process_time() - before
        busy[what] = processor / wall
        print(f"{what:26}{wall:8.3f} sec on the clock {processor:8.3f} of "
              f"processors {busy[what]:6.2f} cores busy")
    if devices[0].kind == "gpu":
        print("The devices are GPUs: these cores only queued the work.")
        return
    for work in ("products", "LeNet step"):
        one, two = busy[f"{work}, one device"], busy[f"{work}, two devices"]
        print(f"{work}: {one:.2f} cores with one device, {two:.2f} with two"
              + ("." if two > 1.5 * one else
                 ": less than half again as many, so the devices waited, for "
                 "each other, for Python, or for cores that others used."))


@exercise
def richer_dependencies():
    """A graph with more dependencies: still right, and faster?

    Two values on two devices. In each round each is multiplied by the other
    one, which is copied from the other device. The matrices are
    permutations: their products are exact, so the results can be compared
    bit for bit.
    """
    devices = mgpu.list_devices(2)
    rng = np.random.default_rng(0)
    a, b = (rng.permutation(settings.size) for _ in range(2))
    as_matrix = np.eye(settings.size, dtype=np.float32)

    def step(mine, other):
        return F.dot(mine, mgpu.put(other, mine))

    def rounds(places):
        values = [mgpu.put(as_matrix[p], place)
                  for p, place in zip((a, b), places)]
        for _ in range(settings.repeat):
            if places[0] == places[1]:      # one device, one task
                values, = mgpu.parallel(
                    lambda v: [step(v[0], v[1]), step(v[1], v[0])], [values])
            else:
                values = mgpu.parallel(step, values, values[::-1])
        return values

    one = seconds(devices, lambda: rounds([devices[0], devices[0]]))
    two = seconds(devices, lambda: rounds(devices))
    p, q = a, b
    for _ in range(settings.repeat):
        p, q = q[p], p[q]                   # the product of permutations
    right = all((mgpu.to_numpy(value) == as_matrix[expected]).all()
                for value, expected in zip(rounds(devices), (p, q)))
    print(f"{settings.repeat} rounds, equal to NumPy in every entry: {right}")
    print(f"one device {1e3 * one:.2f} ms, two devices {1e3 * two:.2f} ms: "
          f"{one / two:.2f} times as fast")
    print("The two products of a round ran side by side, and each round "
          "waited for the one before." if one / two > 1.1 else
          "No gain in this run. In every round the devices wait for each "
          "other, and logical ones share the cores: see `profile`.")


# %% [markdown]
# ## Training from scratch

# %%
@exercise
def batch_times_k():
    """Enlarge the batch from b to k b with k devices: what does it change?"""
    k, b = settings.devices, 64
    one, many = mgpu.list_devices(1), mgpu.list_devices(k)
    rows = {}
    for devices, batch in ((one, b), (many, b), (many, k * b)):
        rows[len(devices), batch] = accuracy, speed, steps = train_lenet(
            devices, batch, 0.2)
        print(f"{name_of(devices):10} batch {batch:4}: {speed:7.0f} images/s, "
              f"{steps:3} steps an epoch, test acc "
              f"{'-' if accuracy is None else format(accuracy, '.3f')}")
    same, larger = rows[k, b], rows[k, k * b]
    if same[1] and larger[1]:
        print(f"With {b} rows each instead of {b // k}, {name_of(many)} "
              f"handled {larger[1] / same[1]:.2f} times as many images a "
              "second. The cost of a step that does not depend on its rows "
              f"was paid {larger[2]} times an epoch instead of {same[2]}.")
    if None not in (same[0], larger[0]):
        print("Fewer steps at the same rate: the accuracy after as many "
              f"epochs changed by {larger[0] - same[0]:+.3f}; the rate should "
              "grow with the batch (next exercise).")


@exercise
def learning_rates():
    """Accuracy against the learning rate: how does it scale with k?"""
    rates, b, best = (0.05, 0.1, 0.2, 0.4), 64, {}
    print("test accuracy", *(f"{f'rate {rate}':>10}" for rate in rates))
    for k in sorted({1, settings.devices}):
        found = [train_lenet(mgpu.list_devices(k), k * b, rate)[0]
                 for rate in rates]
        best[k] = rates[int(np.argmax([a or 0.0 for a in found]))]
        print(f"k={k}, batch {k * b:4}", *(
            f"{'diverged' if a is None else format(a, '.3f'):>9}"
            for a in found))
    k = max(best)
    print(f"Best for one device: {best[1]}; for {k} with {k} times the batch: "
          f"{best[k]}. The rule 'k times the batch, k times the rate' says "
          f"{k * best[1]:g}.")
    print("A step with k times the batch averages k times as many gradients, "
          "so it can be k times as long; the rule ends where a rate is too "
          "large for any batch. One seed and a small test set: differences "
          "of a few hundredths are noise.")


@exercise
def aggregation():
    """Add up different parameters on different devices: why is it faster?

    To aggregate n bytes on one device, every other device sends it n bytes
    and gets n bytes back. So its link carries 2 (k - 1) n bytes and the
    links of the others 2 n each. If the parameters are divided evenly among
    the devices, every link carries about 4 (k - 1) / k n bytes.
    """
    k = max(2, settings.devices)
    devices = mgpu.list_devices(k)
    replicas, _ = resnet_on(mgpu.list_devices(1))
    networks = {
        "LeNet": [p.shape for p in mgpu.models.lenet_params()],
        "ResNet-18": [p.shape for p in replicas.params()]}
    del replicas
    for network, shapes in networks.items():
        sizes = [4 * int(np.prod(shape)) for shape in shapes]
        data = [[mgpu.put(np.full(shape, i + 1, dtype=np.float32), device)
                 for i, device in enumerate(devices)] for shape in shapes]
        ways = {"all on device 0": [0] * len(sizes),
                "parameter i on i % k": [i % k for i in range(len(sizes))],
                "balanced by bytes": mgpu.assign_roots(sizes, k)}
        print(f"{network}, {sum(sizes) / 1e6:.2f} MB in {len(sizes)} arrays, "
              f"{name_of(devices)}: busiest link, time of an all-reduce")
        laps = {}
        for way, roots in ways.items():
            # What crosses the link of device d, in or out.
            links = [sum(2 * size * (k - 1 if root == d else 1)
                         for size, root in zip(sizes, roots))
                     for d in range(k)]

            def collect(device):
                for copies, root in zip(data, roots):
                    if root == device:
                        mgpu.allreduce(copies, root=root)

            laps[way] = seconds(devices, lambda: mgpu.parallel(
                collect, range(k)))
            print(f"    {way:22}{max(links) / 1e6:9.2f} MB"
                  f"{1e3 * laps[way]:10.2f} ms")
        first, last = laps["all on device 0"], laps["balanced by bytes"]
        print(f"    balanced by bytes: {first / last:.2f} times as fast in "
              "this run")
    print("With two devices each link carries the same bytes in all ways, "
          "but both directions and both devices work at once instead of one "
          "after the other. With k devices the busiest link carries 2 / k of "
          "what it carried. Logical CPU devices have no links: they share "
          "one memory, which limits the gain.")


@exercise
def multi_device_accuracy():
    """Test accuracy on all devices."""
    devices = mgpu.list_devices(settings.devices)
    train_iter, test_iter = mgpu.datasets.load(settings.data, 128,
                                               settings.limit)
    device_params, step = lenet_on(devices, 0.2)
    mgpu.train_epochs(step, train_iter, 1, devices)
    nets = [lambda X, p=p: mgpu.models.lenet_forward(X, p)
            for p in device_params]
    one = mgpu.evaluate_accuracy_gpu(nets[:1], test_iter, devices[0])
    many = mgpu.evaluate_accuracy_gpus(nets, test_iter, devices=devices)
    laps = [seconds(devices, lambda: mgpu.evaluate_accuracy_gpu(
        nets[:1], test_iter, devices[0])),
        seconds(devices, lambda: mgpu.evaluate_accuracy_gpus(
            nets, test_iter, devices=devices))]
    print(f"one device {one:.4f} in {laps[0]:.3f} sec, {name_of(devices)} "
          f"{many:.4f} in {laps[1]:.3f} sec: {laps[0] / laps[1]:.2f} times as "
          "fast")
    print(f"the same accuracy: {one == many}. Correct predictions are counted "
          "as whole numbers and divided once, so there is nothing to round.")


# %% [markdown]
# ## The concise way

# %%
@exercise
def resnet_settings():
    """Other epochs, batch sizes and learning rates for ResNet-18."""
    devices = mgpu.list_devices(settings.devices)
    limit, epochs = settings.limit or 96, settings.epochs or 2
    found = []
    for batch, lr in ((16, 0.025), (16, 0.1), (32, 0.05), (32, 0.2)):
        train_iter, test_iter = mgpu.datasets.load(settings.data, batch, limit)
        replicas, trainer = resnet_on(devices, lr)
        history = mgpu.train(replicas, train_iter, test_iter, loss, trainer,
                             epochs, progress=False)
        found.append((history.train_loss[-1], batch, lr))
        print(f"batch {batch}, rate {lr:5}: train loss by epoch "
              + " ".join(f"{x:.3f}" for x in history.train_loss)
              + f", test acc {history.test_acc[-1]:.2f}, "
              f"{history.images_per_second[-1]:.0f} images/s")
    value, batch, lr = min(found)
    print(f"Lowest loss after {epochs} epochs of {limit} images: {value:.3f} "
          f"with batch {batch} and rate {lr}. "
          + ("That is below chance, log(10) = 2.303: it has begun to learn."
             if value < np.log(10) else "That is not below chance, log(10) = "
             "2.303: so few steps cannot rank the settings."))


@exercise
def sixteen_devices():
    """ResNet-18 on 16 devices: what happens?"""
    batch = min(32, settings.limit or 32)
    X = np.random.default_rng(0).random((batch, 1, 28, 28), dtype=np.float32)
    y = np.arange(batch) % 10
    laps = {}
    for k in (1, 16):
        devices = mgpu.list_devices(k)
        replicas, trainer = resnet_on(devices)
        timer = mgpu.Timer(devices)
        for _ in range(2):              # the first one also prepares
            timer.start()
            mgpu.train_batch(X, y, replicas, loss, trainer)
            timer.stop()
        laps[k] = timer.times[-1]
        moved = 2 * (k - 1) * sum(
            4 * np.prod(p.shape) for p in replicas.params())
        print(f"{name_of(devices):11}{-(-batch // k):3} rows at most: "
              f"{laps[k]:7.2f} sec a step, {moved / 1e6:7.0f} MB of gradients "
              "moved")
    first, *others = [[mgpu.to_numpy(x) for x in view.arrays()]
                      for view in replicas]
    # Parameters stand before buffers; the statistics are each device's own.
    count = len(replicas.params())
    print("all 16 copies equal, bit for bit, after two steps:",
          all(a.tobytes() == b.tobytes() for other in others
              for a, b in zip(first[:count], other)))
    print(f"16 devices were {laps[1] / laps[16]:.2f} times as fast as one. "
          "The arithmetic of a step stays the same and is divided; adding up "
          "the gradients and copying the weights grows with k. So 16 devices "
          "need 16 times the batch, and hardware of their own: "
          + ("logical ones share the cores of this machine."
             if devices[0].kind == "cpu" else "these are GPUs."))


@exercise
def unequal_devices():
    """Devices of unequal power: how to divide the work, and does it pay?

    `weights=[2, 1]` gives the first device two rows of three. The gradient
    is the sum over all rows, so it does not depend on which device computed
    which row. The slow device is one that computes everything twice.
    """
    devices = mgpu.list_devices(2)
    train_iter, _ = mgpu.datasets.load(settings.data, 192, settings.limit)
    X, y = next(iter(train_iter))
    gradients = []
    for places, weights in ((devices[:1], None), (devices, [2, 1])):
        device_params, _ = lenet_on(places, 0.1, dtype="float64")
        X_shards, y_shards = mgpu.split_batch(X.astype("float64"), y, places,
                                              weights=weights)
        with mgpu.record():
            losses = mgpu.parallel(forward, X_shards, y_shards, device_params)
        mgpu.backward(losses)
        sums = [[mgpu.grad(p[i]) for p in device_params] for i in range(8)]
        for copies in sums:
            mgpu.allreduce(copies)
        gradients.append([mgpu.to_numpy(copies[0]) for copies in sums])
    difference = max(abs(a - b).max() / abs(a).max()
                     for a, b in zip(*gradients))
    print(f"{len(X)} rows as {[len(shard) for shard in X_shards]}: largest "
          f"relative difference of the gradient {difference:.0e} (float64, "
          f"whose rounding is {np.finfo('float64').eps:.0e})")

    def work(X, params, times):
        for _ in range(times * max(1, settings.repeat // 4)):
            mgpu.models.lenet_forward(X, params)

    params = [mgpu.get_params(mgpu.models.lenet_params(), device)
              for device in devices]
    laps = {}
    for weights in ((1, 1), (2, 1), (4, 1)):
        shards = mgpu.split_and_load(X, devices, weights=weights)
        laps[weights] = seconds(devices, lambda: mgpu.parallel(
            work, shards, params, [1, 2]))
        print(f"weights {list(weights)}, rows "
              f"{[len(shard) for shard in shards]}: {1e3 * laps[weights]:.1f} "
              "ms, the second device half as fast")
    fast = seconds(devices, lambda: mgpu.parallel(
        work, mgpu.split_and_load(X, devices[:1]), params[:1], [1]))
    print(f"the fast device by itself: {1e3 * fast:.1f} ms")
    best = min(laps, key=laps.get)
    print(f"Shares in proportion to power are meant to win; here "
          f"{list(best)} did. " + (
              f"The slow device was worth it: {fast / laps[best]:.2f} times "
              "as fast (1.5 in theory)." if laps[best] < 0.95 * fast else
              "The slow device was not worth it in this run.")
          + " A CPU next to GPUs seldom is: a device 50 times slower adds "
          "2 %, and every step waits for its last row.")


@exercise
def without_waiting():
    """What happens without a wait, and how do two steps overlap?

    LeNet on k devices: wait after every step; wait once at the end; and, to
    overlap two steps, read the loss of step i when step i + 1 is queued.
    """
    devices = mgpu.list_devices(settings.devices)
    train_iter, _ = mgpu.datasets.load(settings.data, 128, settings.limit)
    X, y = next(iter(train_iter))

    def read(losses):
        return [mgpu.to_numpy(part) for part in losses if part is not None]

    results, total, asked = {}, {}, {}
    for mode in ("wait every step", "wait at the end", "one step ahead"):
        _, step = lenet_on(devices, 0.1)
        timer, before, seen = mgpu.Timer(devices), None, []
        began = time.perf_counter()
        for _ in range(settings.repeat):
            losses = step(X, y)
            if mode == "wait every step":
                mgpu.synchronize(devices)
            if mode == "one step ahead" and before is not None:
                seen.append(read(before))
            before = losses
        asked[mode] = time.perf_counter() - began
        total[mode] = timer.stop()
        results[mode] = np.concatenate(read(losses))
        print(f"{mode}: {settings.repeat} steps asked for in "
              f"{asked[mode]:.3f} sec, done after {total[mode]:.3f} sec")
    values = list(results.values())
    print("the same last loss in all three, bit for bit:",
          all(value.tobytes() == values[0].tobytes() for value in values))
    if asked["wait at the end"] < 0.8 * total["wait at the end"]:
        print("Without a wait Python ran ahead of the devices. That is good "
              "for speed. But the queue grows with the number of steps, and "
              "with it the memory of what waits, and a clock that is read "
              "then means nothing. One step ahead keeps the devices busy with "
              "two queued steps at most; mgpu.train works like that.")
    else:
        print("Here Python was not ahead: the work was done when the calls "
              "returned, so there was nothing to wait for, and no two steps "
              "to overlap. On a device with a queue of its own (a GPU, or "
              "MXNet's engine on free cores) it would be.")


# %% [markdown]
# ## Run them

# %%
unknown = [name for name in names if name not in EXERCISES]
if unknown:
    print(f"error: unknown exercises: {', '.join(unknown)}. Use one of "
          f"{', '.join(EXERCISES)}.", file=sys.stderr)
    sys.exit(2)
if listed:
    for name, function in EXERCISES.items():
        print(f"{name:24}{inspect.getdoc(function).splitlines()[0]}")
    names = []
elif backend:
    mgpu.set_backend(backend)
for name in [] if listed else names or EXERCISES:
    print(f"\n=== {name} ({mgpu.get_backend().name})")
    print(inspect.getdoc(EXERCISES[name]), end="\n\n")
    EXERCISES[name]()
