"""DeepSpeed's ZeRO-2 over shoal, on CPUs.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 examples/frameworks/with_deepspeed.py
"""

import deepspeed
import task
from torch import nn, optim


def main() -> None:
    """Train as one rank."""
    backend = task.arguments().backend
    deepspeed.init_distributed(backend)
    net = task.network()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM),
        config={
            "train_micro_batch_size_per_gpu": task.BATCH,
            "gradient_clipping": 0.0,  # DeepSpeed's default is 1
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    batches = task.batches()
    report = task.Report(backend)
    for _ in range(task.EPOCHS):
        for inputs, labels in batches:
            engine.backward(nn.functional.cross_entropy(engine(inputs), labels))
            engine.step()
    report.show(engine.module)
    engine.destroy()


if __name__ == "__main__":
    main()
