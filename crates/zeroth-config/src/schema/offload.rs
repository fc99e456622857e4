//! The two offload sections and `aio`: what leaves the device, and how it travels.

use super::conditions;
use super::key::{Key, KeyType, ReadBy};

words! {
    /// The memory that offloaded state lives in.
    OffloadDevice {
        /// It stays on the device.
        None = "none",
        /// Host memory.
        Cpu = "cpu",
        /// A file on disk.
        Nvme = "nvme",
    }
}

const DEVICES: KeyType = KeyType::OneOf(OffloadDevice::WORDS);

section! {
    /// Values of `zero_optimization.offload_param`.
    PARAM_KEYS: OffloadParam {
        Key::new("zero_optimization.offload_param.device", DEVICES)
            .or_text("none")
            .does("Where parameter shards live: on the device, in host memory, or on disk.")
            .set("cpu when stage 3 alone does not fit; nvme when host memory does not either")
            .read_by(ReadBy::Offload)
            .only(&["none", "cpu"], "write \"cpu\": parameters then live in host memory")
            .idle_if(conditions::params_are_not_sharded)
            => device: OffloadDevice,
        Key::new("zero_optimization.offload_param.nvme_path", KeyType::Text)
            .does("The folder for parameter shards on disk.")
            .set("a folder on a fast local disk")
            .read_by(ReadBy::Offload)
            .unsupported()
            .idle_if(conditions::params_are_not_on_disk),
        Key::int("zero_optimization.offload_param.buffer_count", 1)
            .or_int(5)
            .in_("buffers")
            .does("How many pieces of parameters may be in staging at a time, where pin_memory is false.")
            .set("5; 2 is the least that overlaps")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::nothing_is_staged)
            => buffer_count: u64,
        Key::int("zero_optimization.offload_param.buffer_size", 1)
            .or_int(100_000_000)
            .in_("elements")
            .does("The elements of a rank's shard that one copy to the device moves, in whole blocks of 2,048; where pin_memory is false, buffer_count × buffer_size bounds staging.")
            .set("1e8, or the largest unit's shard if that is smaller")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::params_are_not_offloaded)
            => buffer_size: u64,
        Key::int("zero_optimization.offload_param.max_in_cpu", 0)
            .or_rule("no limit with cpu, 1e9 with nvme")
            .in_("elements")
            .does("The most elements of a rank's shards in host memory: units go there whole, in their order, while they fit; the rest stays on the device.")
            .set("leave it out; a number of elements to keep the rest on the device")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::params_are_not_offloaded)
            => max_in_cpu: Option<u64>,
        Key::bool("zero_optimization.offload_param.pin_memory", true)
            .does("Copies a rank's shard straight to its place in the unit that is gathered; false lets the pieces pass through staging of buffer_count × buffer_size.")
            .set("true")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::params_are_not_offloaded)
            => pin_memory: bool,
        Key::refused(
            "zero_optimization.offload_param.ratio",
            "A key of offload_optimizer.",
            "did you mean offload_optimizer.ratio? parameters have offload_param.max_in_cpu",
        ),
        Key::refused(
            "zero_optimization.offload_param.fast_init",
            "A key of offload_optimizer.",
            "did you mean offload_optimizer.fast_init?",
        ),
    }
}

section! {
    /// Values of `zero_optimization.offload_optimizer`.
    OPTIMIZER_KEYS: OffloadOptimizer {
        Key::new("zero_optimization.offload_optimizer.device", DEVICES)
            .or_text("none")
            .does("Where optimizer state lives: on the device, in host memory, or on disk. State in host memory is updated there on a CPU, and passes through a GPU for it.")
            .set("cpu when the state does not fit the device")
            .read_by(ReadBy::Offload)
            .only(&["none", "cpu"], "write \"cpu\": the state then lives in host memory")
            .idle_if(conditions::state_is_replicated)
            => device: OffloadDevice,
        Key::new("zero_optimization.offload_optimizer.nvme_path", KeyType::Text)
            .does("The folder for optimizer state on disk.")
            .set("a folder on a fast local disk")
            .read_by(ReadBy::Offload)
            .unsupported()
            .idle_if(conditions::optimizer_is_not_on_disk),
        Key::int("zero_optimization.offload_optimizer.buffer_count", 1)
            .or_int(4)
            .in_("buffers")
            .does("How many tiles of updated parameters (sub_group_size elements each) may be on their way at a time, where parameters live in another memory than the state; on a GPU also how many tiles of state pass through it at a time, if zeroth.update_window has no room for more.")
            .set("4; 2 is the least that overlaps")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::updates_stay)
            => buffer_count: u64,
        Key::bool("zero_optimization.offload_optimizer.pin_memory", true)
            .does("Locks the host memory that holds the state.")
            .built_in("state is updated where it lies, without a copy; host memory for a GPU is always locked")
            .idle_if(conditions::optimizer_is_not_offloaded),
        Key::bool("zero_optimization.offload_optimizer.pipeline_read", false)
            .does("Reads the next tile from disk while one is updated.")
            .built_in("reads, updates and writes of tiles always overlap as far as staging allows")
            .unsupported()
            .idle_if(conditions::optimizer_is_not_on_disk),
        Key::bool("zero_optimization.offload_optimizer.pipeline_write", false)
            .does("Writes a tile to disk while the next is updated.")
            .built_in("reads, updates and writes of tiles always overlap as far as staging allows")
            .unsupported()
            .idle_if(conditions::optimizer_is_not_on_disk),
        Key::bool("zero_optimization.offload_optimizer.fast_init", false)
            .does("Builds optimizer state in its place, without a staging copy.")
            .built_in("state is always built where it lives")
            .idle_if(conditions::optimizer_is_not_offloaded),
        Key::float("zero_optimization.offload_optimizer.ratio", 0.0)
            .at_most(1.0)
            .or_float(1.0)
            .does("The share of optimizer state that leaves the device: whole units, in their order, until the share is reached; the rest is updated on the device.")
            .set("1.0, or less to use device memory that is left over")
            .read_by(ReadBy::Offload)
            .idle_if(conditions::optimizer_is_not_offloaded)
            => ratio: f64,
        Key::bool("zero_optimization.offload_optimizer.super_offload", false)
            .does("Updates on the host speculatively while backward runs, and rolls back when wrong.")
            .nothing("the update waits for the norm of all gradients: exact with clipping, nothing to roll back"),
        Key::float("zero_optimization.offload_optimizer.cpuadam_cores_perc", 0.0)
            .at_most(1.0)
            .or_float(0.8)
            .does("The share of cores for SuperOffload's worker.")
            .nothing("it belongs to super_offload; --threads-per-rank sets the cores of a rank"),
        Key::refused(
            "zero_optimization.offload_optimizer.buffer_size",
            "A key of offload_param.",
            "did you mean offload_param.buffer_size? the optimizer's buffers are sized by sub_group_size",
        ),
        Key::refused(
            "zero_optimization.offload_optimizer.max_in_cpu",
            "A key of offload_param.",
            "did you mean offload_param.max_in_cpu? the optimizer has offload_optimizer.ratio",
        ),
    }
}

pub(super) const AIO_KEYS: &[Key] = &[
    Key::section("aio")
        .does("How files on disk are read and written.")
        .read_by(ReadBy::Offload)
        .unsupported()
        .idle_if(conditions::nothing_is_on_disk),
    Key::int("aio.block_size", 512)
        .or_int(1_048_576)
        .in_("bytes")
        .does("The bytes of one read or write.")
        .set("1048576, or what `zeroth bench` finds")
        .read_by(ReadBy::Offload)
        .unsupported()
        .idle_if(conditions::nothing_is_on_disk),
    Key::int("aio.queue_depth", 1)
        .or_int(8)
        .in_("requests")
        .does("How many reads or writes are under way at once.")
        .set("8 to 32")
        .read_by(ReadBy::Offload)
        .unsupported()
        .idle_if(conditions::nothing_is_on_disk),
    Key::int("aio.intra_op_parallelism", 1)
        .or_int(1)
        .in_("threads")
        .does("How many threads serve the disk.")
        .set("1 with io_uring, 4 without")
        .read_by(ReadBy::Offload)
        .unsupported()
        .idle_if(conditions::nothing_is_on_disk),
    Key::int("aio.thread_count", 1)
        .in_("threads")
        .does("The name of intra_op_parallelism before DeepSpeed 0.17; DeepSpeed ignores it since.")
        .deprecated("aio.intra_op_parallelism"),
    Key::bool("aio.single_submit", false)
        .does("Hands requests to the system one by one.")
        .set("false")
        .read_by(ReadBy::Offload)
        .unsupported()
        .idle_if(conditions::nothing_is_on_disk),
    Key::bool("aio.overlap_events", true)
        .does("Submits new requests while old ones complete.")
        .set("true")
        .read_by(ReadBy::Offload)
        .unsupported()
        .idle_if(conditions::nothing_is_on_disk),
    Key::bool("aio.use_gds", false)
        .does("Copies between disk and GPU without host memory.")
        .unsupported_if_on("GPUDirect Storage is not built; data passes through locked host memory")
        .idle_if(conditions::nothing_is_on_disk),
];
