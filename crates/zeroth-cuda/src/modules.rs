//! The sources of the kernels, their compiled form kept on disk, and the functions in them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::path::PathBuf;

use zeroth_base::{DType, publish};

use super::compiler::Compiler;
use super::driver::{Driver, Handle};
use super::flash::{Cuts, is_hopper, program_head};
use zeroth_base::name_key;
use zeroth_kernel::DeviceError;

const PRELUDE: &str = include_str!("kernels/prelude.cu");

/// A file's name, and what it holds.
type File = (&'static str, &'static str);

macro_rules! files {
    ($($name:literal),*) => { &[$(($name, include_str!(concat!("kernels/", $name)))),*] };
}

/// Kernels that are compiled together; programs are compiled at the same time.
struct Program {
    name: String,
    /// What stands before the files.
    begin: String,
    files: &'static [File],
}

/// What every device loads when it is opened.
fn programs() -> [Program; 6] {
    let program = |name: &str, files| Program { name: name.to_owned(), begin: String::new(), files };
    [
        program("elements.cu", files!("elements.cu")),
        program("head.cu", files!("head.cu")),
        program("norm_rope.cu", files!("norm_rope.cu")),
        program("product.cu", files!("product.cu")),
        program("rows.cu", files!("rows.cu")),
        program("step.cu", files!("step.cu")),
    ]
}

/// Attention, which is loaded at its first use: compiling it takes seconds, and a run needs one of many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Attention {
    /// In plain f32 arithmetic.
    Plain,
    /// On the tensor cores, for heads of up to so many elements.
    TensorCores(usize),
}

impl Attention {
    fn program(self, dtype: DType, arch: &str) -> Program {
        let hopper = is_hopper(arch);
        let (name, cuts, files): (_, _, &[File]) = match self {
            Self::Plain => ("attention".to_owned(), String::new(), files!("sequences.cu", "attention.cu")),
            Self::TensorCores(head) => {
                let files: &[File] = if hopper {
                    files!(
                        "sequences.cu",
                        "tiles.cu",
                        "wgmma.cu",
                        "flash_parts.cu",
                        "flash_hopper.cu",
                        "flash_entries.cu"
                    )
                } else {
                    files!(
                        "sequences.cu",
                        "tiles.cu",
                        "mma.cu",
                        "flash_parts.cu",
                        "flash.cu",
                        "flash_entries.cu"
                    )
                };
                (format!("flash_{head}"), Cuts::of(head, hopper).text(), files)
            }
        };
        let (_, of_type, number) = TYPES[place(dtype)];
        Program {
            name: format!("{name}_{of_type}.cu"),
            begin: format!("#define NUMBER {number}\n{cuts}"),
            files,
        }
    }

    /// Forward, dq, and dk with dv.
    const fn names(self) -> [&'static CStr; 3] {
        match self {
            Self::Plain => [c"plain_forward", c"plain_to_queries", c"plain_to_keys"],
            Self::TensorCores(_) => [c"flash_forward", c"flash_to_queries", c"flash_to_keys"],
        }
    }
}

/// For which number types a function exists.
#[derive(Clone, Copy)]
enum Types {
    /// It has none.
    None,
    /// Each.
    One,
    /// Each with each.
    Two,
    /// Each with itself, and each with f32 as the second.
    Widening,
}

macro_rules! entries {
    ($($entry:ident: $program:literal, $name:literal, $types:ident;)*) => {
        /// A function of the kernels.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Entry { $($entry),* }

        /// Entry, file, name without types, and its types.
        const ENTRIES: &[(Entry, &str, &str, Types)] = &[$((Entry::$entry, $program, $name, Types::$types)),*];
    };
}

entries! {
    SwiGlu: "elements.cu", "swiglu", One;
    SwiGluBackward: "elements.cu", "swiglu_backward", One;
    Sum: "elements.cu", "sum", One;
    SumRanks: "elements.cu", "sum_ranks", Two;
    Rope: "elements.cu", "rope", One;
    Dropout: "elements.cu", "dropout", One;
    Convert: "elements.cu", "convert", Two;
    Look: "elements.cu", "look", One;
    SoftmaxLoss: "head.cu", "softmax_loss", One;
    SumLosses: "head.cu", "sum_losses", None;
    HeadNormRope: "norm_rope.cu", "head_norm_rope", One;
    HeadNormRopeBackward: "norm_rope.cu", "head_norm_rope_backward", One;
    Product: "product.cu", "product", Widening;
    Noise: "product.cu", "noise", One;
    Differ: "product.cu", "differ", None;
    Embedding: "rows.cu", "embedding", One;
    EmbeddingBackward: "rows.cu", "embedding_backward", One;
    EmbeddingBackwardLots: "rows.cu", "embedding_backward_lots", One;
    LastRows: "rows.cu", "last_rows", One;
    RmsNorm: "rows.cu", "rms_norm", One;
    RmsNormBackward: "rows.cu", "rms_norm_backward", One;
    RmsNormLots: "rows.cu", "rms_norm_lots", One;
    RmsNormBackwardLots: "rows.cu", "rms_norm_backward_lots", One;
    AttentionDelta: "rows.cu", "attention_delta", One;
    ColumnSums: "rows.cu", "column_sums", One;
    AddColumnSums: "rows.cu", "add_column_sums", None;
    BlockSquares: "step.cu", "block_squares", One;
    ExactSums: "step.cu", "exact_sums", None;
    MergeSums: "step.cu", "merge_sums", None;
    Control: "step.cu", "control", None;
    Optimize: "step.cu", "optimize", None;
}

/// A type with its name in names, and in the kernels.
const TYPES: [(DType, &str, &str); 3] =
    [(DType::F32, "f32", "float"), (DType::Bf16, "bf16", "Bf16"), (DType::F16, "f16", "F16")];

const fn place(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 0,
        DType::Bf16 => 1,
        DType::F16 => 2,
    }
}

/// Where a function for these types stands in the table. A missing type counts as the first.
fn slot(entry: Entry, types: &[DType]) -> usize {
    let at = |number: usize| types.get(number).map_or(0, |&dtype| place(dtype));
    entry as usize * 9 + at(0) * 3 + at(1)
}

/// Functions of attention: forward, dq, and dk with dv. `None` where a card has too little shared memory for them.
type AttentionFunctions = Option<[Handle; 3]>;

/// All kernels, loaded into a device's context.
pub(super) struct Functions {
    compiler: Compiler,
    arch: String,
    modules: RefCell<Vec<Handle>>,
    /// By [`slot`]; 0 where there is none.
    handles: Vec<Handle>,
    /// By place of the type.
    attention: RefCell<BTreeMap<(Attention, usize), AttentionFunctions>>,
}

impl Functions {
    /// Compiles what is not kept on disk, and loads everything but what is loaded at its first use.
    pub(super) fn load(driver: &Driver, arch: &str) -> Result<Self, DeviceError> {
        let mut functions = Self {
            compiler: Compiler::open()?,
            arch: arch.to_owned(),
            modules: RefCell::default(),
            handles: vec![0; ENTRIES.len() * 9],
            attention: RefCell::default(),
        };
        let loaded = functions.fill(driver);
        if loaded.is_err() {
            functions.unload(driver);
        }
        loaded.map(|()| functions)
    }

    fn fill(&mut self, driver: &Driver) -> Result<(), DeviceError> {
        let programs = programs();
        let modules = self.modules(driver, &programs)?;
        for &(entry, program, name, types) in ENTRIES {
            let file = programs.iter().position(|known| known.name == program);
            let module = modules[file.expect("an entry names one of the files")];
            for (first, second) in types.all() {
                let mut symbol = name.to_owned();
                for dtype in [first, second].into_iter().flatten() {
                    symbol += "_";
                    symbol += TYPES[place(dtype)].1;
                }
                let symbol = CString::new(symbol).expect("names of functions hold no zero byte");
                let types: Vec<DType> = [first, second].into_iter().flatten().collect();
                self.handles[slot(entry, &types)] = driver.function(module, &symbol)?;
            }
        }
        Ok(())
    }

    /// Programs in the device's context, in their order.
    fn modules(&self, driver: &Driver, programs: &[Program]) -> Result<Vec<Handle>, DeviceError> {
        let (compiler, arch) = (&self.compiler, self.arch.as_str());
        let kept: Vec<Option<Vec<u8>>> =
            programs.iter().map(|program| kept(program, compiler, arch)).collect();
        let missing = programs.iter().zip(&kept).filter(|(_, kept)| kept.is_none());
        let mut compiled = compile(compiler, arch, missing.map(|(program, _)| program))?.into_iter();
        let mut modules = Vec::new();
        for (program, kept) in programs.iter().zip(kept) {
            let made = |image: Vec<u8>| {
                program.keep(compiler, arch, &image);
                driver.module(&image)
            };
            let module = if let Some(image) = kept {
                // A file that the driver refuses is no reason to stop: it is made anew.
                driver.module(&image).or_else(|_| made(program.compile(compiler, arch)?))?
            } else {
                made(compiled.next().expect("what is missing was compiled"))?
            };
            self.modules.borrow_mut().push(module);
            modules.push(module);
        }
        Ok(modules)
    }

    /// How attention on the tensor cores is cut on this card.
    pub(super) fn cuts(&self, head: usize) -> Cuts {
        Cuts::of(head, is_hopper(&self.arch))
    }

    /// Attention for a type; compiled and loaded where it is not yet.
    pub(super) fn attention(
        &self,
        driver: &Driver,
        attention: Attention,
        dtype: DType,
    ) -> Result<AttentionFunctions, DeviceError> {
        let key = (attention, place(dtype));
        if let Some(&known) = self.attention.borrow().get(&key) {
            return Ok(known);
        }
        let module = self.modules(driver, &[attention.program(dtype, &self.arch)])?[0];
        let mut functions = [0; 3];
        for (function, name) in functions.iter_mut().zip(attention.names()) {
            *function = driver.function(module, name)?;
        }
        let fits = match attention {
            Attention::Plain => true,
            Attention::TensorCores(head) => {
                let mut parts = functions.iter().zip(self.cuts(head).parts());
                parts.all(|(&function, part)| driver.allow_shared(function, part.shared).is_ok())
            }
        };
        let found = fits.then_some(functions);
        self.attention.borrow_mut().insert(key, found);
        Ok(found)
    }

    /// The function for these types.
    pub(super) fn get(&self, entry: Entry, types: &[DType]) -> Handle {
        let handle = self.handles[slot(entry, types)];
        assert!(handle != 0, "{entry:?} has no form for {types:?}");
        handle
    }

    pub(super) fn unload(&self, driver: &Driver) {
        self.modules.borrow().iter().for_each(|&module| driver.unload(module));
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
    fn compile(&self, compiler: &Compiler, arch: &str) -> Result<Vec<u8>, DeviceError> {
        compiler.compile(&self.name, &self.text(), &options(arch).each_ref().map(String::as_str))
    }

    /// Writes machine code where the next start finds it. A cache that cannot be written costs seconds then, and nothing
    /// else.
    fn keep(&self, compiler: &Compiler, arch: &str, image: &[u8]) {
        let Some(path) = self.path(compiler, arch) else { return };
        if path.parent().map_or(Ok(()), std::fs::create_dir_all).is_ok() {
            let _ = publish(&path, image);
        }
    }

    /// The prelude, and the files with their own line numbers.
    fn text(&self) -> String {
        let files = self.files.iter().map(|(name, source)| format!("\n#line 1 \"{name}\"\n{source}"));
        [PRELUDE, &self.begin].map(str::to_owned).into_iter().chain(files).collect()
    }

    /// Where its machine code is kept: the name says the card, the compiler and the sources.
    fn path(&self, compiler: &Compiler, arch: &str) -> Option<PathBuf> {
        let given = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let folder = given("XDG_CACHE_HOME").or_else(|| Some(given("HOME")?.join(".cache")))?;
        let key = name_key(&(options(arch).concat() + &self.text()));
        let name = self.name.trim_end_matches(".cu");
        Some(
            folder.join("zeroth").join(format!("{name}-{arch}-nvrtc{}-{key:016x}.cubin", compiler.version())),
        )
    }
}

fn options(arch: &str) -> [String; 3] {
    // Products and sums stay apart, so that arithmetic is that of the source, as on the processor.
    [format!("--gpu-architecture={arch}"), "-std=c++17".to_owned(), "--fmad=false".to_owned()]
}

fn kept(program: &Program, compiler: &Compiler, arch: &str) -> Option<Vec<u8>> {
    let image = std::fs::read(program.path(compiler, arch)?).ok()?;
    // Every image of the compiler is an ELF file; the driver is not asked to look into anything else.
    image.starts_with(b"\x7fELF").then_some(image)
}

/// Compiles programs at the same time.
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

/// Compiles kernels for an architecture such as `sm_90a`, without a card: those of attention on the tensor cores for heads of
/// so many elements of a type of 16 bits, or all others. Returns the bytes of machine code.
pub fn compile_kernels(arch: &str, attention: Option<(usize, DType)>) -> Result<usize, DeviceError> {
    let compiler = Compiler::open()?;
    let all: Vec<Program> = if let Some((asked, dtype)) = attention {
        let head = program_head(asked).filter(|_| dtype != DType::F32);
        let head = head.ok_or_else(|| DeviceError::Operands {
            what: "attention",
            problem: format!(
                "heads of {asked} elements of {dtype}; the tensor cores take multiples of 8 up to 256, of bf16 or fp16"
            ),
        })?;
        vec![Attention::TensorCores(head).program(dtype, arch)]
    } else {
        let plain = TYPES.map(|(dtype, ..)| Attention::Plain.program(dtype, arch));
        programs().into_iter().chain(plain).collect()
    };
    let images = compile(&compiler, arch, all.iter())?;
    Ok(images.iter().map(Vec::len).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_stand_in_the_order_of_their_numbers_and_in_files_that_define_them() {
        for (number, &(entry, program, name, _)) in ENTRIES.iter().enumerate() {
            assert_eq!(entry as usize, number);
            let text = programs().iter().find(|known| known.name == program).unwrap().text();
            assert!(text.contains(&format!("void {name}")) || text.contains(&format!("{name}_##NAME")));
        }
    }

    #[test]
    fn attention_has_its_functions_on_every_card() {
        for (attention, arch) in
            [Attention::Plain, Attention::TensorCores(128)].into_iter().zip(["sm_80", "sm_90a"])
        {
            let text = attention.program(DType::F16, arch).text();
            let named = |name: &CStr| text.contains(&format!("{}(", name.to_str().unwrap()));
            assert!(attention.names().into_iter().all(named) && text.contains("#define NUMBER F16\n"));
        }
    }

    #[test]
    fn every_function_has_a_slot_of_its_own() {
        let mut slots = std::collections::BTreeSet::new();
        for &(entry, _, _, types) in ENTRIES {
            for (first, second) in types.all() {
                let types: Vec<DType> = [first, second].into_iter().flatten().collect();
                assert!(slots.insert(slot(entry, &types)), "{entry:?} {types:?}");
            }
        }
        assert!(slots.last().is_some_and(|&last| last < ENTRIES.len() * 9));
    }
}
