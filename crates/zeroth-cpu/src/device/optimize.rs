//! The launch of an optimizer: what decides a step is read where it lies, and what is missing is refused.
#![allow(unsafe_code, reason = "operands are places of the arena; every launch is checked before it runs")]

use bytemuck::Pod;
use zeroth_base::DType;

use super::CpuDevice;
use crate::convert::convert;
use crate::optimizer::{Master, Moments, optimize};
use zeroth_kernel::Element;
use zeroth_kernel::{Control, DeviceError, Kernel, MasterForm, Optimizer};

impl CpuDevice {
    /// # Safety
    /// As [`Self::run`], for a launch of [`Kernel::Optimize`] with these types of gradients, moments and weights.
    pub(super) unsafe fn optimize<G: Element + Pod, M: Element + Pod, T: Element + Pod>(
        &self,
        kernel: &Kernel,
    ) -> Result<(), DeviceError> {
        let Kernel::Optimize {
            optimizer,
            group,
            control,
            grads,
            master,
            master_form,
            first,
            second,
            rounding,
            weights,
            ..
        } = *kernel
        else {
            unreachable!("called for the optimizer only")
        };
        let is_beside = weights.is_some() && T::DTYPE == DType::Bf16;
        if master_form == MasterForm::LowBits && !is_beside {
            let problem = format!("what master weights are beside weights in bf16, and weights {weights:?}");
            return Err(DeviceError::Operands { what: kernel.name(), problem });
        }
        // SAFETY: the launch has been checked, and each operand is taken once.
        unsafe {
            let control = self.read_one::<Control>(control)?;
            if control.apply == 0 {
                // Whoever takes the weights from here finds what they were; beside their rests they are.
                if let (Some(weights), MasterForm::F32) = (weights, master_form) {
                    convert::<f32, T>(&self.pool, self.read(master)?, self.write(weights)?);
                }
                return Ok(());
            }
            let step = &control.numbers[group];
            let [mut needs_first, needs_second] = optimizer.moments();
            needs_first &= optimizer != Optimizer::Sgd || step.momentum != 0.0;
            if needs_first && first.is_none() || needs_second && second.is_none() {
                let problem = format!("{optimizer:?} has no place for its moments: {first:?}, {second:?}");
                return Err(DeviceError::Operands { what: kernel.name(), problem });
            }
            let moments = Moments {
                first: first.map(|first| self.write::<M>(first)).transpose()?,
                second: second.map(|second| self.write::<M>(second)).transpose()?,
                rounding: rounding.map(|rounding| (rounding, control.applied)),
            };
            let weights = weights.map(|weights| self.write::<T>(weights)).transpose()?;
            let (grads, master) = match master_form {
                MasterForm::F32 => (self.read::<G>(grads)?, Master::F32(self.write(master)?)),
                MasterForm::LowBits => (self.read::<G>(grads)?, Master::LowBits(self.write(master)?)),
            };
            optimize(&self.pool, optimizer, step, grads, master, moments, weights);
        }
        Ok(())
    }
}
