//! Which processors a rank takes: ranks tell each other what they may use, and each comes to its own part.

use zeroth_comm::{Comm, CommError, OpName};
use zeroth_cpu::CpuAffinity;
use zeroth_kernel::CpuShare;

/// This rank's seat; none where ranks share some of their processors and not all.
pub(super) fn seat(comm: Option<&dyn Comm>) -> Result<Option<CpuShare>, CommError> {
    let Some(comm) = comm else { return Ok(Some(CpuShare { number: 0, of: 1 })) };
    let own = CpuAffinity::allowed().to_bytes();
    let mut sets = vec![own; comm.world()];
    let counts = vec![own.len(); comm.world()];
    let op = OpName::new(0, "divide the processors", 0);
    comm.all_gather(op, &own, sets.as_flattened_mut(), &counts)?.wait()?;
    Ok(CpuAffinity::share(comm.rank(), &sets))
}
