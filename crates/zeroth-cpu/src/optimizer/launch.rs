//! The launch of an optimizer: reads the step's control state and checks the operands.
#![allow(unsafe_code, reason = "operands become slices after they are checked")]

use zeroth_base::DType;
use zeroth_kernel::{Control, DeviceError, Element, MasterForm, Moment, Optimizer, operands};

use super::{Master, Moments, optimize};
use crate::convert::convert;
use crate::launch::{CpuKernel, CpuLaunch, typed};

impl CpuKernel for operands::Optimize {
    fn scratch_bytes(&self, _: usize) -> u64 {
        0
    }

    unsafe fn run<T: Element>(self, cx: &CpuLaunch<'_>) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.moment_type {
                DType::F32 => typed!(self.grad_type, G => run::<G, f32, T>(self, cx)),
                DType::Bf16 => typed!(self.grad_type, G => run::<G, half::bf16, T>(self, cx)),
                DType::F16 => {
                    let problem = "moments are fp32 or bf16: those of fp16 would overflow".to_owned();
                    Err(DeviceError::Operands { what: cx.what, problem })
                }
            }
        }
    }
}

/// # Safety
/// As [`CpuKernel::run`], with these types of gradients, moments and weights.
unsafe fn run<G: Element, M: Element, T: Element>(
    launch: operands::Optimize,
    cx: &CpuLaunch<'_>,
) -> Result<(), DeviceError> {
    let operands::Optimize {
        optimizer,
        group,
        control,
        grads,
        master,
        master_form,
        moments,
        rounding,
        weights,
        ..
    } = launch;
    let has_bf16_weights = weights.is_some() && T::DTYPE == DType::Bf16;
    if master_form == MasterForm::LowBits && !has_bf16_weights {
        let problem = format!(
            "low-order bits of master weights need bf16 weights; found {} weights {weights:?}",
            T::DTYPE
        );
        return Err(DeviceError::Operands { what: cx.what, problem });
    }
    // SAFETY: the caller's promise.
    unsafe {
        let control = cx.read_one::<Control>(control)?;
        if control.apply == 0 {
            // The weights buffer may hold other data; with low-order bits it holds the weights already.
            if let (Some(weights), MasterForm::F32) = (weights, master_form) {
                convert::<f32, T>(cx.pool, cx.read(master)?, cx.write(weights)?);
            }
            return Ok(());
        }
        let step = &control.numbers[group];
        // SGD without momentum needs no momentum buffer.
        let needs_moments = optimizer != Optimizer::Sgd || step.momentum != 0.0;
        let lacks = |moment: &&Moment| moments[**moment as usize].is_none();
        if let Some(lacking) = optimizer.moments().iter().find(lacks).filter(|_| needs_moments) {
            let problem = format!("{optimizer:?} needs {} moments; given: {moments:?}", lacking.name());
            return Err(DeviceError::Operands { what: cx.what, problem });
        }
        let [first, second, third] =
            moments.map(|moment| moment.map(|moment| cx.write::<M>(moment)).transpose());
        let moments = Moments {
            buffers: [first?, second?, third?],
            rounding: rounding.map(|rounding| (rounding, control.applied)),
        };
        let weights = weights.map(|weights| cx.write::<T>(weights)).transpose()?;
        let (grads, master) = match master_form {
            MasterForm::F32 => (cx.read::<G>(grads)?, Master::F32(cx.write(master)?)),
            MasterForm::LowBits => (cx.read::<G>(grads)?, Master::LowBits(cx.write(master)?)),
        };
        optimize(cx.pool, optimizer, step, grads, master, moments, weights);
    }
    Ok(())
}
