//! CUDA modules: kernel sources compiled by NVRTC, cached on disk, and loaded into the context.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};

use zeroth_base::DType;

use super::arch::Arch;
use super::compiler::Compiler;
use super::cubin;
use super::driver::{Driver, Handle};
use super::entry_points::{EntryPoint, TYPES, dtype_index, function_index};
use super::flash::{Features, TileConfigs, padded_head_dim};
use super::grouped_functions::{HOPPER, HopperFunctions, PORTABLE, hopper_shared_limit};
use super::module_cache::ModuleCache;
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
fn programs() -> [Program; 10] {
    let program = |name: &str, files| Program { name: name.to_owned(), defines: String::new(), files };
    [
        program("elementwise.cu", files!("activations.cu", "elementwise.cu")),
        program("cross_entropy.cu", files!("block_reduce.cu", "cross_entropy.cu")),
        program("norm_rope.cu", files!("norm_rope.cu")),
        program("matmul.cu", files!("matmul.cu")),
        program("rowwise.cu", files!("rowwise.cu")),
        program("optimizer_step.cu", files!("optimizer_step.cu")),
        program("cached_attention.cu", files!("cached_attention.cu")),
        program("position_bias.cu", files!("position_bias.cu")),
        program("route.cu", files!("packed_sequences.cu", "route.cu")),
        program("expert_rows.cu", files!("activations.cu", "expert_rows.cu")),
    ]
}

/// Attention kernels, loaded at their first use: compilation takes seconds, and a run needs one variant of many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AttentionVariant {
    /// f32 arithmetic on CUDA cores.
    CudaCores(Features),
    /// Flash attention on tensor cores, for a padded head dimension.
    TensorCores(usize, Features),
}

impl AttentionVariant {
    fn program(self, dtype: DType, arch: &Arch) -> Program {
        let hopper = arch.is_hopper();
        let (name, tiles, files): (_, _, &[File]) = match self {
            Self::CudaCores(features) => (
                format!("attention{}", features.suffix()),
                features.defines(),
                files!("packed_sequences.cu", "attention_context.cu", "attention.cu"),
            ),
            Self::TensorCores(head, features) => {
                let files: &[File] = if hopper {
                    files!(
                        "packed_sequences.cu",
                        "attention_context.cu",
                        "shared_tiles.cu",
                        "warpgroup.cu",
                        "wgmma.cu",
                        "flash_common.cu",
                        "flash_context.cu",
                        "flash_hopper.cu",
                        "flash_entries.cu"
                    )
                } else {
                    files!(
                        "packed_sequences.cu",
                        "attention_context.cu",
                        "shared_tiles.cu",
                        "mma_sync.cu",
                        "mma.cu",
                        "flash_common.cu",
                        "flash_context.cu",
                        "flash.cu",
                        "flash_entries.cu"
                    )
                };
                let tiles = TileConfigs::new(head, hopper, features);
                (format!("flash_{head}{}", features.suffix()), tiles.defines(), files)
            }
        };
        Program::of_type(&name, dtype, &tiles, files)
    }

    /// Kernels of forward, dq, and dk with dv.
    const fn names(self) -> [&'static CStr; 3] {
        match self {
            Self::CudaCores(_) => [c"attention_forward", c"attention_backward_dq", c"attention_backward_dkv"],
            Self::TensorCores(..) => [c"flash_forward", c"flash_backward_dq", c"flash_backward_dkv"],
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

/// Kernels of distillation: with the teacher's logits and with cached ones, each for a forward, a reverse and a mixed divergence; and the k largest.
const DISTILL: [&CStr; 7] = [
    c"distill_forward",
    c"distill_reverse",
    c"distill_mixed",
    c"distill_cached_forward",
    c"distill_cached_reverse",
    c"distill_cached_mixed",
    c"top_log_probs",
];

/// Attention kernels: forward, dq, and dk with dv. `None` if the GPU has too little shared memory.
type AttentionFunctions = Option<[Handle; 3]>;

/// All modules loaded into a device's context, and their functions.
pub(super) struct Modules {
    compiler: Compiler,
    cache: ModuleCache,
    arch: Arch,
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
    /// Loads the modules of these kernels, compiling those that are not cached on disk.
    pub(super) fn load(
        driver: &Driver,
        arch: Arch,
        multiprocessors: u32,
        entries: &[EntryPoint],
    ) -> Result<Self, DeviceError> {
        let mut modules = Self {
            compiler: Compiler::open()?,
            cache: ModuleCache::of_this_user(),
            arch,
            multiprocessors,
            loaded: RefCell::default(),
            functions: vec![0; entries.len() * 9],
            attention: RefCell::default(),
            grouped: Default::default(),
            grouped_hopper: Default::default(),
            distill: Default::default(),
        };
        let loaded = modules.fill(driver, entries);
        if loaded.is_err() {
            modules.unload(driver);
        }
        loaded.map(|()| modules)
    }

    fn fill(&mut self, driver: &Driver, entries: &[EntryPoint]) -> Result<(), DeviceError> {
        let programs = programs();
        let modules = self.load_programs(driver, &programs)?;
        for &entry in entries {
            let file = programs.iter().position(|known| known.name == entry.program);
            let module = modules[file.expect("every entry point names one of the programs")];
            for (first, second) in entry.types.all() {
                let mut symbol = entry.name.to_owned();
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
        let (compiler, arch, cache) = (&self.compiler, &self.arch, &self.cache);
        let read = || -> Vec<Option<Vec<u8>>> {
            programs.iter().map(|program| cache.read(&program.file_name(compiler, arch))).collect()
        };
        let mut cached = read();
        let mut lock = None;
        if cached.iter().any(Option::is_none) {
            lock = cache.lock();
            // Another process may have compiled them meanwhile.
            cached = read();
        }
        let missing = programs.iter().zip(&cached).filter(|(_, cached)| cached.is_none());
        let mut compiled = compile(compiler, arch, missing.map(|(program, _)| program))?.into_iter();
        let mut modules = Vec::new();
        for (program, cached) in programs.iter().zip(cached) {
            let fresh = |image: Vec<u8>| {
                cache.write(&program.file_name(compiler, arch), &image);
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
        drop(lock);
        Ok(modules)
    }

    /// Tile sizes of flash attention on this GPU.
    pub(super) fn tile_configs(&self, head: usize, features: Features) -> TileConfigs {
        TileConfigs::new(head, self.arch.is_hopper(), features)
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
            AttentionVariant::CudaCores(_) => true,
            AttentionVariant::TensorCores(head, features) => {
                let mut kernels = functions.iter().zip(self.tile_configs(head, features).largest_kernels());
                kernels.all(|(&function, kernel)| {
                    kernel.shared <= self.arch.shared_per_block()
                        && driver.allow_shared_memory(function, kernel.shared).is_ok()
                })
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
            let loaded = match TensorMaps::open().filter(|_| self.arch.is_hopper()) {
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
        assert!(function != 0, "{} is not instantiated for {types:?}", entry.name);
        function
    }

    pub(super) fn unload(&self, driver: &Driver) {
        self.loaded.borrow().iter().for_each(|&module| driver.unload(module));
    }
}

impl Program {
    /// A program of one data type, `DTYPE` in its files.
    fn of_type(name: &str, dtype: DType, defines: &str, files: &'static [File]) -> Self {
        let (_, suffix, element) = TYPES[dtype_index(dtype)];
        let defines = format!("#define DTYPE {element}\n{defines}");
        Self { name: format!("{name}_{suffix}.cu"), defines, files }
    }

    fn compile(&self, compiler: &Compiler, arch: &Arch) -> Result<Vec<u8>, DeviceError> {
        let options = options(arch);
        compiler.compile(
            &self.name,
            &self.source(),
            &options.each_ref().map(String::as_str),
            arch.is_virtual(),
        )
    }

    /// The source: prelude, definitions and files, with their own line numbers.
    fn source(&self) -> String {
        let files = self.files.iter().map(|(name, source)| format!("\n#line 1 \"{name}\"\n{source}"));
        [PRELUDE, &self.defines].map(str::to_owned).into_iter().chain(files).collect()
    }

    /// Name of the cached file. It includes the architecture, the compiler version and a hash of the source.
    fn file_name(&self, compiler: &Compiler, arch: &Arch) -> String {
        let key = name_key(&(options(arch).concat() + &self.source()));
        let (name, kind) =
            (self.name.trim_end_matches(".cu"), if arch.is_virtual() { "ptx" } else { "cubin" });
        format!("{name}-{}-nvrtc{}-{key:016x}.{kind}", arch.name(), compiler.version())
    }
}

fn options(arch: &Arch) -> [String; 3] {
    // No fused multiply-add unless the source asks for it, as in the CPU kernels.
    [format!("--gpu-architecture={}", arch.name()), "-std=c++17".to_owned(), "--fmad=false".to_owned()]
}

/// Compiles programs in parallel.
fn compile<'a>(
    compiler: &Compiler,
    arch: &Arch,
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

/// What the compiler made of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompiledKernels {
    /// Bytes of machine code.
    pub bytes: usize,
    /// The most bytes of shared memory that a kernel declares.
    pub static_shared: u32,
    /// The most bytes of shared memory of a program's kernels, with what a launch adds where they ask for more than every GPU has.
    pub shared: u32,
    /// Bytes of shared memory of a block on the architecture.
    pub shared_limit: u32,
}

/// Compiles kernels for an architecture such as `sm_90a`, without a GPU: flash attention for a head dimension and a 16-bit data type,
/// causal or with the biases and dropout of encoder-decoders (`with_context`), or all others.
pub fn compile_kernels(
    arch: &str,
    attention: Option<(usize, DType)>,
    with_context: bool,
) -> Result<CompiledKernels, DeviceError> {
    let arch = &Arch::of_name(arch);
    let compiler = Compiler::open()?;
    let features = if with_context { Features::ALL } else { Features::CAUSAL };
    // Each program with the dynamic shared memory of its largest kernel.
    let all: Vec<(Program, u32)> = if let Some((head_dim, dtype)) = attention {
        let head = padded_head_dim(head_dim).filter(|_| dtype != DType::F32);
        let head = head.ok_or_else(|| DeviceError::Operands {
            what: "attention",
            problem: format!(
                "head_dim {head_dim} in {dtype}; tensor cores support multiples of 8 up to 256, in bf16 or fp16"
            ),
        })?;
        let largest = TileConfigs::new(head, arch.is_hopper(), features).largest_kernels();
        let dynamic = largest.map(|kernel| kernel.shared).into_iter().max().unwrap_or(0);
        vec![(AttentionVariant::TensorCores(head, features).program(dtype, arch), dynamic)]
    } else {
        let cuda_cores = |features| {
            TYPES.map(|(dtype, ..)| AttentionVariant::CudaCores(features).program(dtype, arch)).into_iter()
        };
        let attention = cuda_cores(Features::CAUSAL).chain(cuda_cores(Features::GENERAL));
        let grouped = TYPES.map(|(dtype, ..)| grouped_program(dtype, false));
        let dynamic = (0..HOPPER.len()).map(hopper_shared_limit).max().unwrap_or(0);
        let hopper = arch.is_hopper().then(|| (grouped_program(DType::Bf16, true), dynamic));
        let distill = TYPES.map(|(dtype, ..)| distill_program(dtype));
        let others = programs().into_iter().chain(attention).chain(grouped).chain(distill);
        others.map(|program| (program, 0)).chain(hopper).collect()
    };
    let images = compile(&compiler, arch, all.iter().map(|(program, _)| program))?;
    let statics: Vec<u32> = images.iter().map(|image| cubin::static_shared(image)).collect();
    let shared = statics.iter().zip(&all).map(|(fixed, (_, dynamic))| fixed + dynamic);
    Ok(CompiledKernels {
        bytes: images.iter().map(Vec::len).sum(),
        shared: shared.max().unwrap_or(0),
        static_shared: statics.into_iter().max().unwrap_or(0),
        shared_limit: arch.shared_per_block(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_points_are_defined_in_their_programs() {
        for (number, &EntryPoint { number: position, program, name, .. }) in
            crate::kernels::ENTRIES.iter().enumerate()
        {
            assert_eq!(position, number);
            let text = programs().iter().find(|known| known.name == program).unwrap().source();
            // By its name, or as an argument of a macro that appends `_backward`.
            let stem = name.trim_end_matches("_backward");
            let defined = [
                format!("void {name}"),
                format!("{name}_##NAME"),
                format!("({stem}, "),
                format!(", {stem}, "),
            ];
            assert!(defined.iter().any(|defined| text.contains(defined)), "{name}");
        }
    }

    #[test]
    fn attention_kernels_are_defined_for_every_architecture() {
        let variants = [
            AttentionVariant::CudaCores(Features::CAUSAL),
            AttentionVariant::TensorCores(128, Features::ALL),
        ];
        for (variant, arch) in variants.into_iter().zip(["sm_80", "sm_90a"]) {
            let text = variant.program(DType::F16, &Arch::of_name(arch)).source();
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
}
