"""Measures steps of knowledge distillation by plain PyTorch on a GPU, beside `benches/gpu/steps.py kd kd-host kd-nf4 kd-cache`.

    python benches/peers/distillation.py                          # Qwen3-8B to 0.6B shapes, 4 x 2048
    python benches/peers/distillation.py --rows 2 --length 1024 --teacher 4b
    python benches/peers/distillation.py --device cpu --teacher tiny-teacher --student tiny --length 64   # tests the script

Both models have random bf16 weights; the loss is 0.5 · KL(teacher || student) · T² + 0.5 · cross-entropy at T = 2, over all
tokens; AdamW is PyTorch's fused one. Prints tokens per second of the median step after the third, and the peak memory that
PyTorch allocated. Needs torch and transformers.
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "gpu"))

import steps
import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM


def model(shape, vocabulary, device):
    hidden, feed_forward, layers, heads, kv_heads, head_dim, tied = steps.SHAPES[shape]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=tied,
        use_cache=False, attn_implementation="sdpa",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        made = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", default="8b", choices=steps.SHAPES)
    parser.add_argument("--student", default="0.6b", choices=steps.SHAPES)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    device, is_gpu = arguments.device, arguments.device == "cuda"
    vocabulary = 512 if arguments.student.startswith("tiny") else 151_936
    teacher = model(arguments.teacher, vocabulary, device).eval()
    student = model(arguments.student, vocabulary, device).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
    rows = torch.randint(0, vocabulary, (arguments.rows, arguments.length), device=device)
    temperature, times = 2.0, []
    for _ in range(arguments.steps):
        begun = time.perf_counter()
        with torch.no_grad():
            taught = teacher(input_ids=rows).logits
        output = student(input_ids=rows, labels=rows)
        # [tokens, vocabulary] of both, which is what the memory of this peer goes to.
        own, taught = (
            functional.log_softmax(logits.flatten(0, 1) / temperature, -1) for logits in (output.logits, taught)
        )
        divergence = functional.kl_div(own, taught, reduction="batchmean", log_target=True) * temperature**2
        (0.5 * divergence + 0.5 * output.loss).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    step = statistics.median(times[3:])
    memory = torch.cuda.max_memory_allocated() / 2**30 if is_gpu else float("nan")
    speed = arguments.rows * arguments.length / step
    print(f"PyTorch {speed:10,.0f} tokens/s  {step * 1e3:9.1f} ms  {memory:7.2f} GiB")


if __name__ == "__main__":
    main()
