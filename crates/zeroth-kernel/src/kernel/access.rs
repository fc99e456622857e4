//! How kernels access their operands.

use super::{
    AttentionContext, Balance, BiasGrad, GradStore, HeadLossDw, Span, TeacherSpans, TiedRowsIn, TiedRowsOut,
};

/// How a kernel accesses an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Read only.
    Read,
    /// Written, or read and written.
    Write,
}

/// A field of a kernel that holds spans.
pub(super) trait Operand {
    /// Calls `visit` with its spans. They have this access, except those that the struct itself says otherwise of.
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access));
}

impl Operand for Span {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        visit(self, access);
    }
}

impl<O: Operand> Operand for Option<O> {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        if let Some(operand) = self {
            operand.visit(access, visit);
        }
    }
}

impl<O: Operand, const N: usize> Operand for [O; N] {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        for operand in self {
            operand.visit(access, visit);
        }
    }
}

impl Operand for AttentionContext {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        let Self { starts, kv_starts, bias, dropout } = self;
        [Some(starts), kv_starts, bias, dropout.map(|dropout| dropout.keys)].visit(access, visit);
    }
}

impl Operand for BiasGrad {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        self.to.visit(access, visit);
    }
}

impl Operand for Balance {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        self.before.visit(Access::Read, visit);
        self.after.visit(access, visit);
    }
}

impl Operand for TeacherSpans {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        self.spans().visit(access, visit);
    }
}

impl Operand for GradStore {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        match self {
            Self::Add | Self::Write => {}
            Self::Round { found_inf, .. } => found_inf.visit(access, visit),
        }
    }
}

impl Operand for HeadLossDw {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        self.to.visit(access, visit);
        self.store.visit(access, visit);
        if let Some(TiedRowsOut { ids, rows }) = self.tied_rows {
            ids.visit(Access::Read, visit);
            rows.visit(access, visit);
        }
    }
}

impl Operand for TiedRowsIn {
    fn visit(self, access: Access, visit: &mut impl FnMut(Span, Access)) {
        [self.rows, self.found_inf].visit(access, visit);
    }
}
