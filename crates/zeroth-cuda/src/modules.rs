//! CUDA modules: kernel sources compiled by NVRTC, cached on disk, and loaded into the context.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::path::PathBuf;

use zeroth_base::{DType, GatedActivation, publish};

use super::compiler::Compiler;
use super::distill::DISTILL;
use super::driver::{Driver, Handle};
use super::flash::{TileConfigs, is_hopper, padded_head_dim};
use super::grouped::{HOPPER, HopperFunctions, PORTABLE, hopper_shared_limit};
use super::tensor_map::TensorMaps;
use zeroth_base::name_key;
use zeroth_kernel::DeviceError;

const PRELUDE: &str = include_str!("kernels/prelude.cu");

/// Name and contents of a source file.
type File = (&'static str, &'static str);

macro_rules! files {
    ($($name:literal),*) => { &[$(($name, include_str!(concat!("kernels/", $name)))),*] };
}

/// A translation unit of NVRTC. Programs are compiled in parallel.
struct Program {
    name: String,
    /// Macro definitions before the files.
    defines: String,
    files: &'static [File],
}

/// Programs that every device loads when it is opened.
fn programs() -> [Program; 9] {
    let program = |name: &str, files| Program { name: name.to_owned(), defines: String::new(), files };
    [
        program("elementwise.cu", files!("activations.cu", "elementwise.cu")),
        program("cross_entropy.cu", files!("block_reduce.cu", "cross_entropy.cu")),
        program("norm_rope.cu", files!("norm_rope.cu")),
        program("matmul.cu", files!("matmul.cu")),
        program("rowwise.cu", files!("rowwise.cu")),
        program("optimizer_step.cu", files!("optimizer_step.cu")),
        program("cached_attention.cu", files!("cached_attention.cu")),
        program("route.cu", files!("packed_sequences.cu", "route.cu")),
        program("expert_rows.cu", files!("activations.cu", "expert_rows.cu")),
    ]
}

/// Attention kernels, loaded at their first use: compilation takes seconds, and a run needs one variant of many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AttentionVariant {
    /// f32 arithmetic on CUDA cores.
    CudaCores,
    /// Flash attention on tensor cores, for a padded head dimension.
    TensorCores(usize),
}

impl AttentionVariant {
    fn program(self, dtype: DType, arch: &str) -> Program {
        let hopper = is_hopper(arch);
        let (name, tiles, files): (_, _, &[File]) = match self {
            Self::CudaCores => {
                ("attention".to_owned(), String::new(), files!("packed_sequences.cu", "attention.cu"))
            }
            Self::TensorCores(head) => {
                let files: &[File] = if hopper {
                    files!(
                        "packed_sequences.cu",
                        "shared_tiles.cu",
                        "warpgroup.cu",
                        "wgmma.cu",
                        "flash_common.cu",
                        "flash_hopper.cu",
                        "flash_entries.cu"
                    )
                } else {
                    files!(
                        "packed_sequences.cu",
                        "shared_tiles.cu",
                        "mma_sync.cu",
                        "mma.cu",
                        "flash_common.cu",
                        "flash.cu",
                        "flash_entries.cu"
                    )
                };
                (format!("flash_{head}"), TileConfigs::new(head, hopper).defines(), files)
            }
        };
        Program::of_type(&name, dtype, &tiles, files)
    }

    /// Kernels of forward, dq, and dk with dv.
    const fn names(self) -> [&'static CStr; 3] {
        match self {
            Self::CudaCores => [c"attention_forward", c"attention_backward_dq", c"attention_backward_dkv"],
            Self::TensorCores(_) => [c"flash_forward", c"flash_backward_dq", c"flash_backward_dkv"],
        }
    }
}

/// Grouped matmuls of experts, loaded at their first use: most models have none.
fn grouped_program(dtype: DType, hopper: bool) -> Program {
    if hopper {
        Program::of_type("grouped_hopper", dtype, "", files!("warpgroup.cu", "grouped_hopper.cu"))
    } else {
        Program::of_type("grouped", dtype, "", files!("mma_sync.cu", "grouped.cu"))
    }
}

/// Kernels of distillation, loaded at their first use: most runs have no teacher.
fn distill_program(dtype: DType) -> Program {
    let files = files!("block_reduce.cu", "denominators.cu", "distill.cu", "top_log_probs.cu");
    Program::of_type("distill", dtype, "", files)
}

/// The data types for which a kernel is instantiated.
#[derive(Clone, Copy)]
enum Types {
    /// Not generic.
    None,
    /// Every data type.
    One,
    /// Every pair of data types.
    Two,
    /// Every data type with itself and with f32.
    Widening,
}

macro_rules! entries {
    ($($entry:ident: $program:literal, $name:literal, $types:ident;)*) => {
        /// A kernel, in all its instantiations.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum EntryPoint { $($entry),* }

        /// Entry point, file, name without type suffixes, and types.
        const ENTRIES: &[(EntryPoint, &str, &str, Types)] = &[$((EntryPoint::$entry, $program, $name, Types::$types)),*];
    };
}

entries! {
    SwiGlu: "elementwise.cu", "swiglu", One;
    SwiGluBackward: "elementwise.cu", "swiglu_backward", One;
    GeGlu: "elementwise.cu", "geglu", One;
    GeGluBackward: "elementwise.cu", "geglu_backward", One;
    GeGluTanh: "elementwise.cu", "geglu_tanh", One;
    GeGluTanhBackward: "elementwise.cu", "geglu_tanh_backward", One;
    Add: "elementwise.cu", "add", One;
    SumRanks: "elementwise.cu", "sum_ranks", Two;
    Rope: "elementwise.cu", "rope", One;
    Dropout: "elementwise.cu", "dropout", One;
    Convert: "elementwise.cu", "convert", Two;
    CheckFinite: "elementwise.cu", "check_finite", One;
    Unpack: "elementwise.cu", "unpack_nf4", One;
    CrossEntropy: "cross_entropy.cu", "cross_entropy", One;
    SumLosses: "cross_entropy.cu", "sum_losses", None;
    HeadNormRope: "norm_rope.cu", "head_norm_rope", One;
    HeadNormRopeBackward: "norm_rope.cu", "head_norm_rope_backward", One;
    Matmul: "matmul.cu", "matmul", Widening;
    FillRandom: "matmul.cu", "fill_random", One;
    CompareWords: "matmul.cu", "compare_words", None;
    Embedding: "rowwise.cu", "embedding", One;
    EmbeddingBackward: "rowwise.cu", "embedding_backward", One;
    EmbeddingBackwardVec: "rowwise.cu", "embedding_backward_vec", One;
    GatherLastRows: "rowwise.cu", "gather_last_rows", One;
    RmsNorm: "rowwise.cu", "rms_norm", One;
    RmsNormBackward: "rowwise.cu", "rms_norm_backward", One;
    RmsNormVec: "rowwise.cu", "rms_norm_vec", One;
    RmsNormBackwardVec: "rowwise.cu", "rms_norm_backward_vec", One;
    AttentionDelta: "rowwise.cu", "attention_delta", One;
    ColumnSums: "rowwise.cu", "column_sums", One;
    AddColumnSums: "rowwise.cu", "add_column_sums", None;
    BlockSquares: "optimizer_step.cu", "block_squares", One;
    ExactSums: "optimizer_step.cu", "exact_sums", None;
    MergeSums: "optimizer_step.cu", "merge_sums", None;
    CountTokens: "optimizer_step.cu", "count_tokens", None;
    Control: "optimizer_step.cu", "control", None;
    Optimize: "optimizer_step.cu", "optimize", None;
    OptimizeWithThird: "optimizer_step.cu", "optimize_with_third", None;
    StoreRows: "cached_attention.cu", "store_rows", One;
    CachedAttention: "cached_attention.cu", "cached_attention", One;
    Route: "route.cu", "route", One;
    RouteCount: "route.cu", "route_count", None;
    RouteScan: "route.cu", "route_scan", None;
    RoutePlace: "route.cu", "route_place", None;
    RouteProbabilities: "route.cu", "route_probabilities", One;
    RouteBalance: "route.cu", "route_balance", None;
    RouteBackward: "route.cu", "route_backward", One;
    BalanceLoss: "route.cu", "balance_loss", None;
    GatherRows: "expert_rows.cu", "gather_rows", One;
    CombineRows: "expert_rows.cu", "combine_rows", One;
    SwiGluRows: "expert_rows.cu", "swiglu_rows", One;
    SwiGluRowsBackward: "expert_rows.cu", "swiglu_rows_backward", One;
    GeGluRows: "expert_rows.cu", "geglu_rows", One;
    GeGluRowsBackward: "expert_rows.cu", "geglu_rows_backward", One;
    GeGluTanhRows: "expert_rows.cu", "geglu_tanh_rows", One;
    GeGluTanhRowsBackward: "expert_rows.cu", "geglu_tanh_rows_backward", One;
}

impl EntryPoint {
    pub(super) const fn gated_activation(activation: GatedActivation) -> Self {
        match activation {
            GatedActivation::Silu => Self::SwiGlu,
            GatedActivation::Gelu => Self::GeGlu,
            GatedActivation::GeluTanh => Self::GeGluTanh,
        }
    }

    pub(super) const fn gated_activation_backward(activation: GatedActivation) -> Self {
        match activation {
            GatedActivation::Silu => Self::SwiGluBackward,
            GatedActivation::Gelu => Self::GeGluBackward,
            GatedActivation::GeluTanh => Self::GeGluTanhBackward,
        }
    }

    pub(super) const fn gated_rows(activation: GatedActivation) -> Self {
        match activation {
            GatedActivation::Silu => Self::SwiGluRows,
            GatedActivation::Gelu => Self::GeGluRows,
            GatedActivation::GeluTanh => Self::GeGluTanhRows,
        }
    }

    pub(super) const fn gated_rows_backward(activation: GatedActivation) -> Self {
        match activation {
            GatedActivation::Silu => Self::SwiGluRowsBackward,
            GatedActivation::Gelu => Self::GeGluRowsBackward,
            GatedActivation::GeluTanh => Self::GeGluTanhRowsBackward,
        }
    }
}

/// A data type, its suffix in kernel names, and its name in CUDA.
const TYPES: [(DType, &str, &str); 3] =
    [(DType::F32, "f32", "float"), (DType::Bf16, "bf16", "Bf16"), (DType::F16, "f16", "F16")];

const fn dtype_index(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}

/// Index of an instantiation in the function table. A missing type counts as index 0.
fn function_index(entry: EntryPoint, types: &[DType]) -> usize {
    let at = |number: usize| types.get(number).map_or(0, |&dtype| dtype_index(dtype));
    entry as usize * 9 + at(0) * 3 + at(1)
}

/// Attention kernels: forward, dq, and dk with dv. `None` if the GPU has too little shared memory.
type AttentionFunctions = Option<[Handle; 3]>;

/// All modules loaded into a device's context, and their functions.
pub(super) struct Modules {
    compiler: Compiler,
    arch: String,
    multiprocessors: u32,
    loaded: RefCell<Vec<Handle>>,
    /// By [`function_index`]; 0 for combinations without an instantiation.
    functions: Vec<Handle>,
    /// By variant and [`dtype_index`].
    attention: RefCell<BTreeMap<(AttentionVariant, usize), AttentionFunctions>>,
    /// By [`dtype_index`].
    grouped: [OnceCell<[Handle; PORTABLE.len()]>; 3],
    grouped_hopper: [OnceCell<Option<HopperFunctions>>; 3],
    distill: [OnceCell<[Handle; DISTILL.len()]>; 3],
}

impl Modules {
    /// Loads all modules except attention, compiling those that are not cached on disk.
    pub(super) fn load(driver: &Driver, arch: &str, multiprocessors: u32) -> Result<Self, DeviceError> {
        let mut modules = Self {
            compiler: Compiler::open()?,
            arch: arch.to_owned(),
            multiprocessors,
            loaded: RefCell::default(),
            functions: vec![0; ENTRIES.len() * 9],
            attention: RefCell::default(),
            grouped: Default::default(),
            grouped_hopper: Default::default(),
            distill: Default::default(),
        };
        let loaded = modules.fill(driver);
        if loaded.is_err() {
            modules.unload(driver);
        }
        loaded.map(|()| modules)
    }

    fn fill(&mut self, driver: &Driver) -> Result<(), DeviceError> {
        let programs = programs();
        let modules = self.load_programs(driver, &programs)?;
        for &(entry, program, name, types) in ENTRIES {
            let file = programs.iter().position(|known| known.name == program);
            let module = modules[file.expect("every entry point names one of the programs")];
            for (first, second) in types.all() {
                let mut symbol = name.to_owned();
                for dtype in [first, second].into_iter().flatten() {
                    symbol += "_";
                    symbol += TYPES[dtype_index(dtype)].1;
                }
                let symbol = CString::new(symbol).expect("kernel names contain no NUL");
                let types: Vec<DType> = [first, second].into_iter().flatten().collect();
                self.functions[function_index(entry, &types)] = driver.function(module, &symbol)?;
            }
        }
        Ok(())
    }

    /// Loads programs, from the disk cache where possible; returns their modules in order.
    fn load_programs(&self, driver: &Driver, programs: &[Program]) -> Result<Vec<Handle>, DeviceError> {
        let (compiler, arch) = (&self.compiler, self.arch.as_str());
        let cached: Vec<Option<Vec<u8>>> =
            programs.iter().map(|program| program.read_cache(compiler, arch)).collect();
        let missing = programs.iter().zip(&cached).filter(|(_, cached)| cached.is_none());
        let mut compiled = compile(compiler, arch, missing.map(|(program, _)| program))?.into_iter();
        let mut modules = Vec::new();
        for (program, cached) in programs.iter().zip(cached) {
            let fresh = |image: Vec<u8>| {
                program.write_cache(compiler, arch, &image);
                driver.module(&image)
            };
            let module = if let Some(image) = cached {
                // A cached file that the driver rejects is recompiled.
                driver.module(&image).or_else(|_| fresh(program.compile(compiler, arch)?))?
            } else {
                fresh(compiled.next().expect("every program that is not cached was compiled"))?
            };
            self.loaded.borrow_mut().push(module);
            modules.push(module);
        }
        Ok(modules)
    }

    /// Tile sizes of flash attention on this GPU.
    pub(super) fn tile_configs(&self, head: usize) -> TileConfigs {
        TileConfigs::new(head, is_hopper(&self.arch))
    }

    /// The attention kernels for a data type, compiled and loaded at the first call.
    pub(super) fn attention(
        &self,
        driver: &Driver,
        variant: AttentionVariant,
        dtype: DType,
    ) -> Result<AttentionFunctions, DeviceError> {
        let key = (variant, dtype_index(dtype));
        if let Some(&known) = self.attention.borrow().get(&key) {
            return Ok(known);
        }
        let module = self.load_programs(driver, &[variant.program(dtype, &self.arch)])?[0];
        let mut functions = [0; 3];
        for (function, name) in functions.iter_mut().zip(variant.names()) {
            *function = driver.function(module, name)?;
        }
        let fits = match variant {
            AttentionVariant::CudaCores => true,
            AttentionVariant::TensorCores(head) => {
                let mut kernels = functions.iter().zip(self.tile_configs(head).kernels());
                kernels.all(|(&function, kernel)| driver.allow_shared_memory(function, kernel.shared).is_ok())
            }
        };
        let found = fits.then_some(functions);
        self.attention.borrow_mut().insert(key, found);
        Ok(found)
    }

    /// The grouped matmuls for any size, compiled and loaded at the first call.
    pub(super) fn grouped(
        &self,
        driver: &Driver,
        dtype: DType,
    ) -> Result<[Handle; PORTABLE.len()], DeviceError> {
        let cell = &self.grouped[dtype_index(dtype)];
        self.loaded_once(driver, cell, || grouped_program(dtype, false), &PORTABLE)
    }

    /// The kernels of distillation, compiled and loaded at the first call.
    pub(super) fn distill(
        &self,
        driver: &Driver,
        dtype: DType,
    ) -> Result<[Handle; DISTILL.len()], DeviceError> {
        let cell = &self.distill[dtype_index(dtype)];
        self.loaded_once(driver, cell, || distill_program(dtype), &DISTILL)
    }

    /// The functions of a program that is compiled and loaded at the first call.
    fn loaded_once<const N: usize>(
        &self,
        driver: &Driver,
        cell: &OnceCell<[Handle; N]>,
        program: impl Fn() -> Program,
        names: &[&CStr; N],
    ) -> Result<[Handle; N], DeviceError> {
        if let Some(&functions) = cell.get() {
            return Ok(functions);
        }
        let module = self.load_programs(driver, &[program()])?[0];
        let mut functions = [0; N];
        for (function, name) in functions.iter_mut().zip(names) {
            *function = driver.function(module, name)?;
        }
        Ok(*cell.get_or_init(|| functions))
    }

    /// The grouped matmuls by Hopper's features, compiled and loaded at the first call. `None` on other GPUs, or with an older driver.
    pub(super) fn grouped_hopper(
        &self,
        driver: &Driver,
        dtype: DType,
    ) -> Result<Option<&HopperFunctions>, DeviceError> {
        let cell = &self.grouped_hopper[dtype_index(dtype)];
        if cell.get().is_none() {
            let loaded = match TensorMaps::open().filter(|_| is_hopper(&self.arch)) {
                Some(tensor_maps) => Some(self.load_grouped_hopper(driver, dtype, tensor_maps)?),
                None => None,
            };
            return Ok(cell.get_or_init(|| loaded).as_ref());
        }
        Ok(cell.get().and_then(Option::as_ref))
    }

    fn load_grouped_hopper(
        &self,
        driver: &Driver,
        dtype: DType,
        tensor_maps: TensorMaps,
    ) -> Result<HopperFunctions, DeviceError> {
        let module = self.load_programs(driver, &[grouped_program(dtype, true)])?[0];
        let mut all = [0; HOPPER.len()];
        for (position, (function, name)) in all.iter_mut().zip(HOPPER).enumerate() {
            *function = driver.function(module, name)?;
            driver.allow_shared_memory(*function, hopper_shared_limit(position))?;
        }
        Ok(HopperFunctions { all, tensor_maps, multiprocessors: self.multiprocessors })
    }

    /// The function of an instantiation.
    pub(super) fn get(&self, entry: EntryPoint, types: &[DType]) -> Handle {
        let function = self.functions[function_index(entry, types)];
        assert!(function != 0, "{entry:?} is not instantiated for {types:?}");
        function
    }

    pub(super) fn unload(&self, driver: &Driver) {
        self.loaded.borrow().iter().for_each(|&module| driver.unload(module));
    }
}

impl Types {
    fn all(self) -> Vec<(Option<DType>, Option<DType>)> {
        let each = || TYPES.iter().map(|&(dtype, ..)| Some(dtype));
        match self {
            Self::None => vec![(None, None)],
            Self::One => each().map(|dtype| (dtype, None)).collect(),
            Self::Two => each().flat_map(|first| each().map(move |second| (first, second))).collect(),
            Self::Widening => {
                let wide = each().map(|dtype| (dtype, Some(DType::F32)));
                wide.chain(each().skip(1).map(|dtype| (dtype, dtype))).collect()
            }
        }
    }
}

impl Program {
    /// A program of one data type, `DTYPE` in its files.
    fn of_type(name: &str, dtype: DType, defines: &str, files: &'static [File]) -> Self {
        let (_, suffix, element) = TYPES[dtype_index(dtype)];
        let defines = format!("#define DTYPE {element}\n{defines}");
        Self { name: format!("{name}_{suffix}.cu"), defines, files }
    }

    fn compile(&self, compiler: &Compiler, arch: &str) -> Result<Vec<u8>, DeviceError> {
        compiler.compile(&self.name, &self.source(), &options(arch).each_ref().map(String::as_str))
    }

    /// Reads the cached cubin.
    fn read_cache(&self, compiler: &Compiler, arch: &str) -> Option<Vec<u8>> {
        let image = std::fs::read(self.path(compiler, arch)?).ok()?;
        // Cubins are ELF files; the driver is not given anything else.
        image.starts_with(b"\x7fELF").then_some(image)
    }

    /// Caches a cubin on disk. Failures are ignored: the next start recompiles.
    fn write_cache(&self, compiler: &Compiler, arch: &str, image: &[u8]) {
        let Some(path) = self.path(compiler, arch) else { return };
        if path.parent().map_or(Ok(()), std::fs::create_dir_all).is_ok() {
            let _ = publish(&path, image);
        }
    }

    /// The source: prelude, definitions and files, with their own line numbers.
    fn source(&self) -> String {
        let files = self.files.iter().map(|(name, source)| format!("\n#line 1 \"{name}\"\n{source}"));
        [PRELUDE, &self.defines].map(str::to_owned).into_iter().chain(files).collect()
    }

    /// Path of the cached cubin. The name includes the architecture, the compiler version and a hash of the source.
    fn path(&self, compiler: &Compiler, arch: &str) -> Option<PathBuf> {
        let given = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let folder = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")))?;
        let key = name_key(&(options(arch).concat() + &self.source()));
        let name = self.name.trim_end_matches(".cu");
        Some(
            folder.join("zeroth").join(format!("{name}-{arch}-nvrtc{}-{key:016x}.cubin", compiler.version())),
        )
    }
}

fn options(arch: &str) -> [String; 3] {
    // No fused multiply-add unless the source asks for it, as in the CPU kernels.
    [format!("--gpu-architecture={arch}"), "-std=c++17".to_owned(), "--fmad=false".to_owned()]
}

/// Compiles programs in parallel.
fn compile<'a>(
    compiler: &Compiler,
    arch: &str,
    programs: impl Iterator<Item = &'a Program>,
) -> Result<Vec<Vec<u8>>, DeviceError> {
    std::thread::scope(|scope| {
        let start = |program: &'a Program| {
            let compiling =
                std::thread::Builder::new().spawn_scoped(scope, move || program.compile(compiler, arch));
            compiling.map_err(|error| DeviceError::Call {
                device: "cuda".to_owned(),
                call: "starting a thread that compiles kernels".to_owned(),
                reason: error.to_string(),
            })
        };
        let threads = programs.map(start).collect::<Result<Vec<_>, _>>()?;
        let join =
            |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().expect("compiling does not panic");
        threads.into_iter().map(join).collect()
    })
}

/// Compiles kernels for an architecture such as `sm_90a`, without a GPU: flash attention for a head dimension and a 16-bit data type,
/// or all others. Returns the size of the machine code in bytes.
pub fn compile_kernels(arch: &str, attention: Option<(usize, DType)>) -> Result<usize, DeviceError> {
    let compiler = Compiler::open()?;
    let all: Vec<Program> = if let Some((head_dim, dtype)) = attention {
        let head = padded_head_dim(head_dim).filter(|_| dtype != DType::F32);
        let head = head.ok_or_else(|| DeviceError::Operands {
            what: "attention",
            problem: format!(
                "head_dim {head_dim} in {dtype}; tensor cores support multiples of 8 up to 256, in bf16 or fp16"
            ),
        })?;
        vec![AttentionVariant::TensorCores(head).program(dtype, arch)]
    } else {
        let cuda_cores = TYPES.map(|(dtype, ..)| AttentionVariant::CudaCores.program(dtype, arch));
        let grouped = TYPES.map(|(dtype, ..)| grouped_program(dtype, false));
        let hopper = is_hopper(arch).then(|| grouped_program(DType::Bf16, true));
        let distill = TYPES.map(|(dtype, ..)| distill_program(dtype));
        programs().into_iter().chain(cuda_cores).chain(grouped).chain(hopper).chain(distill).collect()
    };
    let images = compile(&compiler, arch, all.iter())?;
    Ok(images.iter().map(Vec::len).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_points_are_defined_in_their_programs() {
        for (number, &(entry, program, name, _)) in ENTRIES.iter().enumerate() {
            assert_eq!(entry as usize, number);
            let text = programs().iter().find(|known| known.name == program).unwrap().source();
            // By its name, or as a first argument of a macro that appends `_backward`.
            let argument = format!("({}, ", name.trim_end_matches("_backward"));
            let defined = [format!("void {name}"), format!("{name}_##NAME"), argument];
            assert!(defined.iter().any(|defined| text.contains(defined)), "{name}");
        }
    }

    #[test]
    fn attention_kernels_are_defined_for_every_architecture() {
        for (variant, arch) in [AttentionVariant::CudaCores, AttentionVariant::TensorCores(128)]
            .into_iter()
            .zip(["sm_80", "sm_90a"])
        {
            let text = variant.program(DType::F16, arch).source();
            let named = |name: &CStr| text.contains(&format!("{}(", name.to_str().unwrap()));
            assert!(variant.names().into_iter().all(named) && text.contains("#define DTYPE F16\n"));
        }
    }

    #[test]
    fn grouped_kernels_are_defined() {
        for (names, hopper) in [(&PORTABLE[..], false), (&HOPPER[..], true)] {
            let text = grouped_program(DType::Bf16, hopper).source();
            assert!(names.iter().all(|name| text.contains(&format!("({}, ", name.to_str().unwrap()))));
        }
    }

    #[test]
    fn kernels_of_distillation_are_defined() {
        let text = distill_program(DType::Bf16).source();
        for name in DISTILL.map(|name| name.to_str().unwrap()) {
            let kind = name.rsplit('_').next().unwrap();
            assert!(
                text.contains(&format!(" {name}(")) || text.contains(&format!("INSTANTIATE({kind}, ")),
                "{name}"
            );
        }
    }

    #[test]
    fn every_instantiation_has_its_own_index() {
        let mut indices = std::collections::BTreeSet::new();
        for &(entry, _, _, types) in ENTRIES {
            for (first, second) in types.all() {
                let types: Vec<DType> = [first, second].into_iter().flatten().collect();
                assert!(indices.insert(function_index(entry, &types)), "{entry:?} {types:?}");
            }
        }
        assert!(indices.last().is_some_and(|&last| last < ENTRIES.len() * 9));
    }
}
