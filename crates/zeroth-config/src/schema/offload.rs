//! The two offload sections and `aio`: what leaves the device, and how it travels.

use super::key::{Key, Kind, Reader};
use super::when;

const DEVICES: Kind = Kind::OneOf(&["none", "cpu", "nvme"]);

pub(super) const KEYS: &[Key] = &[
    Key::new("zero_optimization.offload_param.device", DEVICES)
        .or_text("none")
        .does("Where parameter shards live: on the device, in host memory, or on disk.")
        .set("cpu when stage 3 alone does not fit; nvme when host memory does not either")
        .read_by(Reader::Offload)
        .only(&["none"], "write \"none\", or leave the section out: parameters then stay on the device")
        .unless(when::offload_param_possible),
    Key::new("zero_optimization.offload_param.nvme_path", Kind::Text)
        .does("The folder for parameter shards on disk.")
        .set("a folder on a fast local disk")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::params_on_disk),
    Key::int("zero_optimization.offload_param.buffer_count", 1)
        .or_int(5)
        .in_("buffers")
        .does("How many staging buffers carry parameters between host and device, for cpu as well as nvme.")
        .set("5; 2 is the least that overlaps")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::params_offloaded),
    Key::int("zero_optimization.offload_param.buffer_size", 1)
        .or_int(100_000_000)
        .in_("elements")
        .does("The size of one staging buffer; buffer_count × buffer_size bounds staging, for cpu as well as nvme.")
        .set("1e8, or the largest unit's shard if that is smaller")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::params_offloaded),
    Key::int("zero_optimization.offload_param.max_in_cpu", 0)
        .or_rule("no limit with cpu, 1e9 with nvme")
        .in_("elements")
        .does("The most parameter elements in host memory; with cpu the rest stays on the device, with nvme on disk.")
        .set("leave it out; a number of elements to keep the rest on the device")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::params_offloaded),
    Key::bool("zero_optimization.offload_param.pin_memory", true)
        .does("Locks the host memory, which copies to a GPU need to run beside computation; false is pageable memory.")
        .set("true, unless locked memory is limited (`zeroth doctor` shows the limit)")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::params_offloaded),
    Key::new("zero_optimization.offload_optimizer.device", DEVICES)
        .or_text("none")
        .does("Where optimizer state lives and is updated: on the device, in host memory, or on disk.")
        .set("cpu when the state does not fit the device")
        .read_by(Reader::Offload)
        .only(&["none"], "write \"none\", or leave the section out: the state then stays on the device")
        .unless(when::stage_cuts_state),
    Key::new("zero_optimization.offload_optimizer.nvme_path", Kind::Text)
        .does("The folder for optimizer state on disk.")
        .set("a folder on a fast local disk")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::optimizer_on_disk),
    Key::int("zero_optimization.offload_optimizer.buffer_count", 1)
        .or_int(4)
        .in_("buffers")
        .does("How many staging buffers carry optimizer state, for cpu as well as nvme.")
        .set("4: one each for weight, gradient and the two moments")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::optimizer_offloaded),
    Key::bool("zero_optimization.offload_optimizer.pin_memory", true)
        .does("Locks the host memory, which copies to a GPU need to run beside computation; false is pageable memory.")
        .set("true, unless locked memory is limited (`zeroth doctor` shows the limit)")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::optimizer_offloaded),
    Key::bool("zero_optimization.offload_optimizer.pipeline_read", false)
        .does("Reads the next tile from disk while one is updated.")
        .built_in("reads, updates and writes of tiles always overlap as far as staging allows")
        .not_yet()
        .unless(when::optimizer_on_disk),
    Key::bool("zero_optimization.offload_optimizer.pipeline_write", false)
        .does("Writes a tile to disk while the next is updated.")
        .built_in("reads, updates and writes of tiles always overlap as far as staging allows")
        .not_yet()
        .unless(when::optimizer_on_disk),
    Key::bool("zero_optimization.offload_optimizer.fast_init", false)
        .does("Builds optimizer state in its place, without a staging copy.")
        .set("true")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::optimizer_offloaded),
    Key::float("zero_optimization.offload_optimizer.ratio", 0.0)
        .at_most(1.0)
        .or_float(1.0)
        .does("The share of optimizer state that leaves the device; the rest is updated there.")
        .set("1.0, or less to use device memory that is left over")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::optimizer_offloaded),
    Key::bool("zero_optimization.offload_optimizer.super_offload", false)
        .does("Updates on the host speculatively while backward runs, and rolls back when wrong.")
        .nothing("the update is overlapped with the next forward instead: exact with clipping, nothing to roll back"),
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
    Key::section("aio").does("How files on disk are read and written.").read_by(Reader::Offload).not_yet().unless(when::something_on_disk),
    Key::int("aio.block_size", 512)
        .or_int(1_048_576)
        .in_("bytes")
        .does("The bytes of one read or write.")
        .set("1048576, or what `zeroth bench` finds")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::something_on_disk),
    Key::int("aio.queue_depth", 1)
        .or_int(8)
        .in_("requests")
        .does("How many reads or writes are under way at once.")
        .set("8 to 32")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::something_on_disk),
    Key::int("aio.intra_op_parallelism", 1)
        .or_int(1)
        .in_("threads")
        .does("How many threads serve the disk.")
        .set("1 with io_uring, 4 without")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::something_on_disk),
    Key::int("aio.thread_count", 1)
        .in_("threads")
        .does("The name of intra_op_parallelism before DeepSpeed 0.17; DeepSpeed ignores it since.")
        .deprecated("aio.intra_op_parallelism"),
    Key::bool("aio.single_submit", false)
        .does("Hands requests to the system one by one.")
        .set("false")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::something_on_disk),
    Key::bool("aio.overlap_events", true)
        .does("Submits new requests while old ones complete.")
        .set("true")
        .read_by(Reader::Offload)
        .not_yet()
        .unless(when::something_on_disk),
    Key::bool("aio.use_gds", false)
        .does("Copies between disk and GPU without host memory.")
        .lacking("GPUDirect Storage is not built; data passes through locked host memory")
        .unless(when::something_on_disk),
];
