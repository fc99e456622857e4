//! The launch of an optimizer: reads the step's control state and checks the operands.
#![allow(unsafe_code, reason = "operands are spans of the arena; every launch is checked before it runs")]

use bytemuck::Pod;
use zeroth_base::DType;

use super::CpuDevice;
use crate::convert::convert;
use crate::optimizer::{Master, Moments, optimize};
use zeroth_kernel::Element;
use zeroth_kernel::{Control, DeviceError, Kernel, MasterForm, Moment, Optimizer};

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
            moments,
            rounding,
            weights,
            ..
        } = *kernel
        else {
            unreachable!("called for the optimizer only")
        };
        let has_bf16_weights = weights.is_some() && T::DTYPE == DType::Bf16;
        if master_form == MasterForm::LowBits && !has_bf16_weights {
            let problem = format!(
                "low-order bits of master weights need bf16 weights; found {} weights {weights:?}",
                T::DTYPE
            );
            return Err(DeviceError::Operands { what: kernel.name(), problem });
        }
        // SAFETY: the launch has been checked, and each operand is taken once.
        unsafe {
            let control = self.read_one::<Control>(control)?;
            if control.apply == 0 {
                // The weights buffer may hold other data; with low-order bits it holds the weights already.
                if let (Some(weights), MasterForm::F32) = (weights, master_form) {
                    convert::<f32, T>(&self.pool, self.read(master)?, self.write(weights)?);
                }
                return Ok(());
            }
            let step = &control.numbers[group];
            // SGD without momentum needs no momentum buffer.
            let needs_moments = optimizer != Optimizer::Sgd || step.momentum != 0.0;
            let lacks = |moment: &&Moment| moments[**moment as usize].is_none();
            if let Some(lacking) = optimizer.moments().iter().find(lacks).filter(|_| needs_moments) {
                let problem = format!("{optimizer:?} needs {} moments; given: {moments:?}", lacking.name());
                return Err(DeviceError::Operands { what: kernel.name(), problem });
            }
            let [first, second, third] =
                moments.map(|moment| moment.map(|moment| self.write::<M>(moment)).transpose());
            let moments = Moments {
                buffers: [first?, second?, third?],
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
