//! Lines of launches that the driver keeps as one: enqueued by one call, with less between one kernel and the next.
#![allow(unsafe_code, reason = "calls into the driver; signatures are those of cuda.h")]

use std::ffi::c_int;

use super::driver::Handle;
use super::library::Library;
use zeroth_kernel::DeviceError;

/// What is called meanwhile, by this thread or another, is none of the line's affair.
const RELAXED: c_int = 2;

/// The variable that turns them off.
const VARIABLE: &str = "ZEROTH_GPU_GRAPHS";

fn is_wanted(asked: &str) -> Result<bool, DeviceError> {
    match asked {
        "" | "on" => Ok(true),
        "off" => Ok(false),
        other => Err(DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!("it is `{other}`; write off, or unset it"),
        }),
    }
}

/// The driver's functions for lines, and the lines that are kept.
pub(super) struct Graphs {
    begin: unsafe extern "C" fn(Handle, c_int) -> c_int,
    end: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    instantiate: unsafe extern "C" fn(*mut Handle, Handle, u64) -> c_int,
    forget: unsafe extern "C" fn(Handle) -> c_int,
    launch: unsafe extern "C" fn(Handle, Handle) -> c_int,
    forget_kept: unsafe extern "C" fn(Handle) -> c_int,
    kept: Vec<Handle>,
}

impl Graphs {
    /// None where the driver is older than they are, or where nobody wants them.
    pub(super) fn open() -> Result<Option<Self>, DeviceError> {
        let asked = std::env::var_os(VARIABLE).unwrap_or_default();
        Ok(if is_wanted(&asked.to_string_lossy())? { Self::find() } else { None })
    }

    fn find() -> Option<Self> {
        let library = Library::open(&["libcuda.so.1"], "Install NVIDIA's driver").ok()?;
        // SAFETY: each function has the type that cuda.h declares for it.
        unsafe {
            Some(Self {
                begin: library.function("cuStreamBeginCapture_v2").ok()?,
                end: library.function("cuStreamEndCapture").ok()?,
                instantiate: library.function("cuGraphInstantiateWithFlags").ok()?,
                forget: library.function("cuGraphDestroy").ok()?,
                launch: library.function("cuGraphLaunch").ok()?,
                forget_kept: library.function("cuGraphExecDestroy").ok()?,
                kept: Vec::new(),
            })
        }
    }

    /// From now on what is enqueued on a stream is written down and not run; false where the driver refuses.
    pub(super) fn begin(&self, stream: Handle) -> bool {
        // SAFETY: a living stream.
        unsafe { (self.begin)(stream, RELAXED) == 0 }
    }

    /// Keeps what was written down since `begin`, and gives its number; none where the driver cannot, or where the
    /// outcome of what was enqueued says so.
    pub(super) fn end(
        &mut self,
        stream: Handle,
        outcome: Result<(), DeviceError>,
    ) -> Result<Option<usize>, DeviceError> {
        let (mut graph, mut kept) = (0, 0);
        // SAFETY: a stream that writes down; writes one handle.
        let code = unsafe { (self.end)(stream, &raw mut graph) };
        if code != 0 || graph == 0 {
            return outcome.map(|()| None);
        }
        // SAFETY: writes one handle; the line is copied, and the first one given back once.
        let code = unsafe {
            let code = if outcome.is_ok() { (self.instantiate)(&raw mut kept, graph, 0) } else { 1 };
            (self.forget)(graph);
            code
        };
        outcome?;
        if code != 0 {
            return Ok(None);
        }
        self.kept.push(kept);
        Ok(Some(self.kept.len() - 1))
    }

    /// Enqueues a kept line; what the driver says.
    pub(super) fn launch(&self, kept: usize, stream: Handle) -> c_int {
        // SAFETY: a line that is kept, and a living stream.
        unsafe { (self.launch)(self.kept[kept], stream) }
    }

    /// Gives all of them back.
    pub(super) fn close(&mut self) {
        for kept in self.kept.drain(..) {
            // SAFETY: kept in `end`, given back once.
            unsafe { (self.forget_kept)(kept) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_kept_unless_they_are_turned_off_and_other_words_are_refused() {
        assert_eq!((is_wanted(""), is_wanted("on"), is_wanted("off")), (Ok(true), Ok(true), Ok(false)));
        let error = is_wanted("0").unwrap_err().to_string();
        assert!(error.contains("ZEROTH_GPU_GRAPHS") && error.contains("`0`; write off"), "{error}");
    }
}
