//! CPU affinity: the ranks of a machine exchange the CPUs they may use, and each takes its own share.

use zeroth_comm::{Comm, CommError, OpName};
use zeroth_cpu::CpuAffinity;
use zeroth_kernel::CpuShare;

/// This rank's share of the CPUs; `None` where the ranks' CPU sets overlap only in part.
pub(super) fn cpu_share(comm: Option<&dyn Comm>) -> Result<Option<CpuShare>, CommError> {
    let Some(comm) = comm else { return Ok(Some(CpuShare { number: 0, of: 1 })) };
    let comm = comm.of_machine().unwrap_or(comm);
    let own = CpuAffinity::allowed().to_bytes();
    let mut sets = vec![own; comm.world()];
    let counts = vec![own.len(); comm.world()];
    let op = OpName::new(0, "divide the CPUs", 0);
    comm.all_gather(op, &own, sets.as_flattened_mut(), &counts)?.wait()?;
    Ok(CpuAffinity::share(comm.rank(), &sets))
}
