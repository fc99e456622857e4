//! CUDA graphs: a captured sequence of launches, enqueued by one call and with shorter gaps between kernels.
#![allow(unsafe_code, reason = "calls into the driver; signatures are those of cuda.h")]

use std::ffi::c_int;

use super::bindings::bindings;
use super::driver::{Driver, Handle};
use zeroth_kernel::DeviceError;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: other driver calls are allowed during a capture.
pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;

/// The environment variable that disables graphs.
const VARIABLE: &str = "ZEROTH_GPU_GRAPHS";

fn is_enabled(value: &str) -> Result<bool, DeviceError> {
    match value {
        "" | "on" => Ok(true),
        "off" => Ok(false),
        other => Err(DeviceError::Call {
            device: "cuda".to_owned(),
            call: format!("reading {VARIABLE}"),
            reason: format!("it is `{other}`; write off, or unset it"),
        }),
    }
}

bindings! {
    Functions: driver {
        cuStreamBeginCapture_v2(Handle, c_int);
        cuStreamEndCapture(Handle, *mut Handle);
        cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
        cuGraphDestroy(Handle);
        cuGraphLaunch(Handle, Handle);
        cuGraphExecDestroy(Handle);
    }
}

/// The instantiated graphs of a device.
pub(super) struct Graphs {
    functions: Functions,
    executables: Vec<Handle>,
}

impl Graphs {
    /// `None` if the driver is too old for CUDA graphs, or if the user has disabled them.
    pub(super) fn open() -> Result<Option<Self>, DeviceError> {
        let value = std::env::var_os(VARIABLE).unwrap_or_default();
        if !is_enabled(&value.to_string_lossy())? {
            return Ok(None);
        }
        let functions = Driver::library().and_then(|library| Functions::load(&library)).ok();
        Ok(functions.map(|functions| Self { functions, executables: Vec::new() }))
    }

    /// Starts capturing a stream: launches are recorded instead of executed. False if the driver refuses.
    pub(super) fn begin_capture(&self, stream: Handle) -> bool {
        // SAFETY: a live stream.
        unsafe { (self.functions.cuStreamBeginCapture_v2)(stream, CAPTURE_MODE_RELAXED) == 0 }
    }

    /// Ends the capture and instantiates the graph; returns its index. `None` if the driver cannot. `outcome` is that of the
    /// captured launches.
    pub(super) fn end_capture(
        &mut self,
        stream: Handle,
        outcome: Result<(), DeviceError>,
    ) -> Result<Option<usize>, DeviceError> {
        let (mut graph, mut executable) = (0, 0);
        // SAFETY: a stream in capture mode; writes one handle.
        let code = unsafe { (self.functions.cuStreamEndCapture)(stream, &raw mut graph) };
        if code != 0 || graph == 0 {
            return outcome.map(|()| None);
        }
        // SAFETY: writes one handle; the executable is a copy of the graph, which is destroyed once.
        let code = unsafe {
            let code = if outcome.is_ok() {
                (self.functions.cuGraphInstantiateWithFlags)(&raw mut executable, graph, 0)
            } else {
                1
            };
            (self.functions.cuGraphDestroy)(graph);
            code
        };
        outcome?;
        if code != 0 {
            return Ok(None);
        }
        self.executables.push(executable);
        Ok(Some(self.executables.len() - 1))
    }

    /// Launches a graph; returns the driver's status.
    pub(super) fn launch(&self, index: usize, stream: Handle) -> c_int {
        // SAFETY: an instantiated graph and a live stream.
        unsafe { (self.functions.cuGraphLaunch)(self.executables[index], stream) }
    }

    /// Destroys all graphs.
    pub(super) fn close(&mut self) {
        for executable in self.executables.drain(..) {
            // SAFETY: instantiated by `end_capture`, destroyed once.
            unsafe { (self.functions.cuGraphExecDestroy)(executable) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_are_enabled_by_default_and_unknown_values_are_rejected() {
        assert_eq!((is_enabled(""), is_enabled("on"), is_enabled("off")), (Ok(true), Ok(true), Ok(false)));
        let error = is_enabled("0").unwrap_err().to_string();
        assert!(error.contains("ZEROTH_GPU_GRAPHS") && error.contains("`0`; write off"), "{error}");
    }
}
