//! The table of variables, in groups as the page shows them.
//!
//! Sources: DeepSpeed 0.19.6's own code for `DS_*` and `DEEPSPEED_*` (the four names that never existed were looked for
//! in its whole history), the CUDA programming guide's appendix, PyTorch's and NCCL's pages of variables.

use super::variable::EnvVerdict::{self, Honoured, NoEffect, Unknown, Unsupported};
use super::variable::Variable;

const fn of(name: &'static str, does: &'static str, verdict: EnvVerdict, message: &'static str) -> Variable {
    Variable { name, does, verdict, message }
}

const RANKS: &str = "ranks that torchrun, srun, mpirun or mpiexec started on one machine find each other by it; `zeroth train --ranks N` \
                     starts its ranks itself";
const JOB: &str = "ranks of torchrun know their job by it; on one machine they meet without a port";
const OURS: &str = "`zeroth train` sets it for the ranks that it starts; it is not for users to set";
const DEVICE: &str = "the driver reads it, so it counts for runs with --device cuda";
const NCCL: &str = "NCCL reads it where ranks exchange bytes by it: see ZEROTH_GPU_COLLECTIVES";
const NO_EXTENSIONS: &str =
    "no extension is compiled: kernels are part of the binary or compiled by NVRTC for the GPU found";
const OFFLINE: &str = "nothing is fetched from a network, whatever this says";
const NO_WANDB: &str = "there is no Weights & Biases client here; a run writes metrics.jsonl";

pub(super) const GROUPS: &[(&str, &[Variable])] = &[
    ("zeroth", ZEROTH),
    ("Ranks and launchers", LAUNCHERS),
    ("CUDA", CUDA),
    ("NCCL", COLLECTIVES),
    ("PyTorch", PYTORCH),
    ("DeepSpeed", DEEPSPEED),
    ("Threads", THREADS),
    ("Hugging Face and reports", HUGGING_FACE),
];

const ZEROTH: &[Variable] = &[
    of("NO_COLOR", "Asks programs for no colours.", Honoured, "output has no colours, on a terminal too"),
    of(
        "ZEROTH_CACHE",
        "The folder of token caches and of the machine's profile.",
        Honoured,
        "tokenised data is kept in its `tokens` folder, what `bench` measures in `machines`; without it in `zeroth` below XDG_CACHE_HOME or ~/.cache",
    ),
    of(
        "ZEROTH_CPU",
        "Chooses the instructions of the CPU's kernels: amx, avx512, avx2, neon or portable.",
        Honoured,
        "kernels run on that path, and a path that the machine lacks is refused; without it they take the best one. \
         `doctor` names it",
    ),
    of(
        "ZEROTH_CUDA_LIBRARIES",
        "Folders, with `:` between them, that hold libnvrtc, libcublasLt, libcudnn and libnccl.",
        Honoured,
        "runs with --device cuda search them before all other places",
    ),
    of(
        "ZEROTH_MPI_LIBRARY",
        "The MPI library, by path or by a name for the loader.",
        Honoured,
        "ranks on several hosts open it and no other; without it they open the library of the mpirun that started them",
    ),
    of(
        "ZEROTH_GPU_ATTENTION",
        "Chooses who computes attention forward on a GPU: cudnn or own.",
        Honoured,
        "cudnn does so wherever it can: in 16 bits, heads of up to 128, no window, and all sequences of a micro-batch of one \
         length; it is refused where the library is not found. Without it the faster of both is taken, by a rule of sizes \
         and the GPU alone, so that runs repeat each other's bits; results differ in their last bits",
    ),
    of(
        "ZEROTH_GPU_COLLECTIVES",
        "Chooses how GPU ranks exchange data: ipc, nccl or host.",
        Honoured,
        "ipc copies from GPU to GPU, nccl uses NVIDIA's library (a GPU for each rank), host goes through the \
         host's memory; results are the same bits. One that does not work is refused; without it the first of them that \
         works is taken",
    ),
    of(
        "ZEROTH_GPU_COMM_STREAM",
        "own: collectives have a stream of their own, for tests.",
        Honoured,
        "they always do where every rank has a GPU; ranks that share one enqueue them in the compute stream, because it takes the \
         GPU two milliseconds to change between processes of which one waits. Results are the same bits",
    ),
    of(
        "ZEROTH_GPU_CONNECT_SECONDS",
        "The seconds that GPUs of ranks have to connect to each other.",
        Honoured,
        "a transport that takes longer, or longer for one of the first exchanges, is given up for the next one; without it \
         60. NCCL needs more for thousands of ranks",
    ),
    of(
        "ZEROTH_GPU_ARCH",
        "Compiles kernels for an older GPU: 8.0, 8.6, 8.9 or 9.0.",
        Honoured,
        "with its instructions and its shared memory, as PTX that the driver translates: to try here what another GPU will run; \
         one that the GPU does not run is refused",
    ),
    of(
        "ZEROTH_GPU_GRAPHS",
        "off: every kernel is enqueued by itself.",
        Honoured,
        "otherwise a GPU's driver keeps the line of kernels of a section that has one queue and no collectives (a CUDA graph) \
         and enqueues it by one call; the same kernels in the same order",
    ),
    of("ZEROTH_RANK", "The number of a rank, set by our launcher for its ranks.", Honoured, OURS),
    of("ZEROTH_WORLD", "The number of ranks, set by our launcher.", Honoured, OURS),
    of("ZEROTH_JOB_FD", "The shared memory of a job, handed to its ranks.", Honoured, OURS),
    of(
        "ZEROTH_JOB_TOKEN",
        "What a rank must know to join a job: 32 hexadecimal digits.",
        Honoured,
        "launchers set it for the ranks that they start; with `zeroth launch --no-ssh`, srun or torchrun on several hosts set \
         it to the same on all (`openssl rand -hex 16`), readable by nobody else",
    ),
    of(
        "ZEROTH_STOP_SIGNAL",
        "SIGUSR1 or SIGUSR2: the signal that asks ranks under mpirun to save and to stop.",
        Honoured,
        "`zeroth launch --launcher openmpi` or `mpich` sets it, as mpirun forwards no other signal; it is not for users to set",
    ),
    of(
        "ZEROTH_HANDOFF_FD",
        "What the launcher has read and decided for all ranks: the config's text, memory they may take, token caches, the \
         checkpoint to resume from.",
        Honoured,
        OURS,
    ),
    of("ZEROTH_TERMINAL", "Tells a rank that its launcher writes to a terminal.", Honoured, OURS),
];

const LAUNCHERS: &[Variable] = &[
    of("RANK", "The number of this rank, from 0.", Honoured, RANKS),
    of(
        "WORLD_SIZE",
        "The number of ranks.",
        Honoured,
        "ranks that torchrun started on one machine join; `config verify` reads it in front of a command",
    ),
    of("LOCAL_RANK", "The number of this rank on its machine.", Honoured, RANKS),
    of("LOCAL_WORLD_SIZE", "The number of ranks on this machine.", Honoured, RANKS),
    of("MASTER_ADDR", "The machine where ranks meet.", Honoured, JOB),
    of("MASTER_PORT", "The port where ranks meet.", Honoured, JOB),
    of("SLURM_*", "SLURM's words for rank, world and hosts.", Honoured, RANKS),
    of("OMPI_COMM_WORLD_*", "Open MPI's words for rank and world.", Honoured, RANKS),
    of("PMI_*", "MPICH's and Intel MPI's words for rank and world.", Honoured, RANKS),
    of(
        "NPROC_PER_NODE",
        "Ranks on each machine, for ms-swift.",
        NoEffect,
        "it is ms-swift's: write --ranks. `config verify` reads it in front of a command",
    ),
    of(
        "NNODES",
        "The number of machines, for ms-swift.",
        NoEffect,
        "it is ms-swift's: write `zeroth launch --nnodes`. `config verify` reads it in front of a command",
    ),
    of(
        "NODE_RANK",
        "The number of this machine, for ms-swift.",
        NoEffect,
        "ms-swift reads it; `zeroth launch` numbers the machines itself, or takes --node-rank",
    ),
];

const CUDA: &[Variable] = &[
    of(
        "CUDA_VISIBLE_DEVICES",
        "The GPUs that a process sees, and their order.",
        Honoured,
        "the driver applies it, so `doctor`, `plan` and `train` see these GPUs only",
    ),
    of(
        "CUDA_DEVICE_ORDER",
        "Whether GPUs are numbered by speed or by bus.",
        Honoured,
        "the driver applies it, and GPUs are listed in that order",
    ),
    of(
        "CUDA_HOME",
        "Where the CUDA toolkit lies.",
        Honoured,
        "its lib64 is searched for cuBLASLt, NVRTC and the other libraries",
    ),
    of("CUDA_PATH", "Another name for CUDA_HOME.", NoEffect, "write CUDA_HOME"),
    of(
        "LD_LIBRARY_PATH",
        "Folders where the system looks for libraries first.",
        Honoured,
        "the driver, cuBLASLt, NVRTC, NCCL, cuDNN and MPI are opened through the system's loader, which reads it",
    ),
    of(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "How many queues reach a GPU side by side; Megatron wants 1.",
        Honoured,
        DEVICE,
    ),
    of("CUDA_LAUNCH_BLOCKING", "1 waits for each kernel, to find the one that fails.", Honoured, DEVICE),
    of(
        "CUDA_AUTO_BOOST",
        "0 keeps the clock from rising above its base.",
        NoEffect,
        "the driver reads it for GPUs before Pascal only; `nvidia-smi --lock-gpu-clocks` holds the clock of newer ones",
    ),
    of(
        "NVIDIA_TF32_OVERRIDE",
        "0 turns TF32 off in NVIDIA's libraries.",
        NoEffect,
        "matmuls in f32 do not use TF32 here, so there is nothing to turn off",
    ),
    of(
        "CUBLAS_WORKSPACE_CONFIG",
        "The workspace of cuBLAS; PyTorch wants it set for repeatable results.",
        NoEffect,
        "workspaces are constants of the program; results repeat without it",
    ),
];

const COLLECTIVES: &[Variable] = &[
    of("NCCL_DEBUG", "What NCCL prints: VERSION, WARN, INFO or TRACE.", Honoured, NCCL),
    of("NCCL_P2P_DISABLE", "1 keeps GPUs from reading each other's memory directly.", Honoured, NCCL),
    of("NCCL_IB_DISABLE", "1 uses sockets instead of InfiniBand.", Honoured, NCCL),
    of(
        "NCCL_SOCKET_IFNAME",
        "The network interfaces to use.",
        Honoured,
        "NCCL reads it where ranks exchange bytes by it; without it ranks of one machine set it to lo, so that NCCL listens on \
         no network",
    ),
    of("NCCL_IB_HCA", "The InfiniBand adapters to use.", Honoured, NCCL),
    of(
        "NCCL_ASYNC_ERROR_HANDLING",
        "PyTorch's old name of TORCH_NCCL_ASYNC_ERROR_HANDLING.",
        NoEffect,
        "it is PyTorch's, not NCCL's, and there is no PyTorch here",
    ),
    of(
        "NCCL_BLOCKING_WAIT",
        "PyTorch's old name of TORCH_NCCL_BLOCKING_WAIT.",
        NoEffect,
        "it is PyTorch's, not NCCL's, and there is no PyTorch here",
    ),
    of("NCCL_*", "Other settings of NCCL.", Honoured, NCCL),
    of(
        "GLOO_SOCKET_IFNAME",
        "The network interface of Gloo, PyTorch's collectives on CPUs.",
        NoEffect,
        "ranks on CPUs do not talk through Gloo here",
    ),
];

const PYTORCH: &[Variable] = &[
    of(
        "PYTORCH_ALLOC_CONF",
        "How PyTorch's allocator splits, keeps and returns memory.",
        NoEffect,
        "memory is planned before the first step",
    ),
    of(
        "PYTORCH_CUDA_ALLOC_CONF",
        "The older name of PYTORCH_ALLOC_CONF.",
        NoEffect,
        "memory is planned before the first step",
    ),
    of(
        "PYTORCH_HIP_ALLOC_CONF",
        "The same on AMD's GPUs.",
        NoEffect,
        "memory is planned before the first step",
    ),
    of(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "1 turns PyTorch's cache of memory off.",
        NoEffect,
        "memory is planned before the first step; nothing is cached",
    ),
    of(
        "TORCH_DISTRIBUTED_DEBUG",
        "OFF, INFO or DETAIL: how much PyTorch checks and logs of collectives.",
        NoEffect,
        "there is no PyTorch here; ranks compare a hash of all their collectives before the first step",
    ),
    of("TORCH_NCCL_*", "How PyTorch watches NCCL.", NoEffect, "there is no PyTorch here"),
    of("TORCH_CUDA_ARCH_LIST", "The GPUs that extensions are compiled for.", NoEffect, NO_EXTENSIONS),
    of("TORCH_EXTENSIONS_DIR", "Where compiled extensions are kept.", NoEffect, NO_EXTENSIONS),
    of(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "1 lets PyTorch's fp32 matmuls run in TF32.",
        NoEffect,
        "there is no PyTorch here",
    ),
];

const DEEPSPEED: &[Variable] = &[
    of(
        "DS_ACCELERATOR",
        "The kind of device: cuda, cpu, xpu, …",
        NoEffect,
        "it is DeepSpeed's; --device cpu|cuda of `zeroth train` says it",
    ),
    of(
        "DS_PIN_MEMORY_BACKEND",
        "How host memory is locked: torch or native.",
        NoEffect,
        "there is one way here: the driver locks the host memory that a GPU copies from",
    ),
    of(
        "DS_SDMA_ALLGATHER",
        "1 gathers with the copy engines of AMD's GPUs.",
        NoEffect,
        "AMD's GPUs are not among the devices here",
    ),
    of(
        "DS_SDMA_ALLGATHER_MAX_NUMEL",
        "The largest gather that goes through them, in elements.",
        NoEffect,
        "AMD's GPUs are not among the devices here",
    ),
    of(
        "DS_DC_OFFLOAD_*",
        "Budgets of DeepCompile's offload passes, for tests.",
        NoEffect,
        "--device-memory is the budget here",
    ),
    of("DS_IGNORE_CUDA_DETECTION", "Compiles extensions without looking for CUDA.", NoEffect, NO_EXTENSIONS),
    of(
        "DS_SKIP_CUDA_CHECK",
        "Compiles extensions though CUDA's and PyTorch's versions differ.",
        NoEffect,
        NO_EXTENSIONS,
    ),
    of("DS_NVCC_THREADS", "Threads of the compiler of extensions.", NoEffect, NO_EXTENSIONS),
    of("DS_BUILD_*", "Which extensions are compiled at installation.", NoEffect, NO_EXTENSIONS),
    of(
        "DS_ENV_FILE",
        "The file of variables that the launcher hands to other machines.",
        Unsupported,
        "`zeroth launch` is not built yet",
    ),
    of(
        "DEEPSPEED_TIMEOUT",
        "Minutes until a collective that hangs ends the run.",
        NoEffect,
        "it is DeepSpeed's; here a rank that is dead or stopped is named within 10 seconds by its heartbeat",
    ),
    of(
        "DEEPSPEED_ELASTICITY_CONFIG",
        "The elasticity settings of the scheduler, to be equal to the file's.",
        NoEffect,
        "any number of ranks resumes a checkpoint, so there is nothing to agree on",
    ),
    of(
        "DS_ALLOW_DEPRECATED_FP16",
        "1 lets fp16 run on Pascal GPUs (compute capability 6).",
        NoEffect,
        "it is DeepSpeed's; `doctor` says what a GPU can do",
    ),
    of(
        "DS_PIPE_RESERVE",
        "Nothing: DeepSpeed never had it.",
        Unknown,
        "DeepSpeed never had such a variable; there is no pipeline here, and memory is reserved by the plan",
    ),
    of(
        "DS_SKIP_UNUSED_PARAMETERS",
        "Nothing: DeepSpeed never had it.",
        Unknown,
        "DeepSpeed never had such a variable; nearest is the key zero_optimization.ignore_unused_parameters, and here the \
         program knows beforehand which parameters a step uses",
    ),
    of(
        "DS_REUSE_BUFFERS",
        "Nothing: DeepSpeed never had it.",
        Unknown,
        "DeepSpeed never had such a variable; here buffers whose lifetimes do not meet share their place, always",
    ),
    of(
        "DS_USE_CUDA_TILING",
        "Nothing: DeepSpeed never had it.",
        Unknown,
        "DeepSpeed never had such a variable; nearest is its class TiledLinear, and here kernels tile matmuls by \
         their shapes",
    ),
];

const THREADS: &[Variable] = &[
    of(
        "OMP_NUM_THREADS",
        "Threads of OpenMP; launchers set it to 1.",
        NoEffect,
        "there is no OpenMP here; --threads-per-rank of `zeroth train` says it",
    ),
    of(
        "MKL_NUM_THREADS",
        "Threads of Intel's MKL.",
        NoEffect,
        "there is no MKL here; --threads-per-rank of `zeroth train` says it",
    ),
    of("KMP_*", "Settings of Intel's OpenMP, such as pinning.", NoEffect, "there is no OpenMP here"),
];

const HUGGING_FACE: &[Variable] = &[
    of(
        "HF_HOME",
        "Where Hugging Face keeps its files.",
        Honoured,
        "a Hub name given as --model is looked for in its folder `hub`",
    ),
    of(
        "HF_HUB_CACHE",
        "Where models of the Hub are kept.",
        Honoured,
        "a Hub name given as --model is looked for in it",
    ),
    of(
        "HUGGINGFACE_HUB_CACHE",
        "The older name of HF_HUB_CACHE.",
        Honoured,
        "read where HF_HUB_CACHE is not set",
    ),
    of(
        "TRANSFORMERS_CACHE",
        "An older name of HF_HUB_CACHE, in transformers.",
        NoEffect,
        "write HF_HUB_CACHE",
    ),
    of("HF_HUB_OFFLINE", "1 fetches nothing.", NoEffect, OFFLINE),
    of("TRANSFORMERS_OFFLINE", "1 fetches nothing.", NoEffect, OFFLINE),
    of("HF_DATASETS_OFFLINE", "1 fetches nothing.", NoEffect, OFFLINE),
    of("HF_ENDPOINT", "Another address of the Hub, such as a mirror.", NoEffect, OFFLINE),
    of(
        "TOKENIZERS_PARALLELISM",
        "Whether tokenisation uses several threads.",
        NoEffect,
        "rows are tokenised on all cores, before ranks are started",
    ),
    of("WANDB_*", "Settings of Weights & Biases.", NoEffect, NO_WANDB),
];
