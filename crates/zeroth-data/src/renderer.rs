//! A folder's chat template, rendered in this process or in worker processes.

use serde_json::{Map, Value};

use super::RowProblem;
use super::chat_template::{
    CompiledTemplate, RenderError, Rendered, Sources, TemplateContext, TemplateProperties,
};
use super::template_process::{TemplateProcesses, Worker};

/// A compiled chat template.
pub(super) struct ChatTemplate {
    /// The file it was found in.
    file: String,
    renderer: Renderer,
    properties: TemplateProperties,
}

enum Renderer {
    Here(Box<CompiledTemplate>),
    Processes(TemplateProcesses),
}

impl ChatTemplate {
    /// Compiles the templates of `file`, in this process or in a worker.
    pub(super) fn new(
        file: &str,
        sources: &Sources,
        context: &TemplateContext,
        worker: Option<&Worker>,
    ) -> Result<Self, RowProblem> {
        let bad = |error| match error {
            RenderError::Failed(message) => RowProblem::BadTemplate { file: file.to_owned(), message },
            RenderError::LimitExceeded(what) => RowProblem::TemplateStopped { file: file.to_owned(), what },
        };
        let (renderer, properties) = match worker {
            None => {
                let compiled = CompiledTemplate::new(sources, context).map_err(bad)?;
                let properties = compiled.properties();
                (Renderer::Here(Box::new(compiled)), properties)
            }
            Some(worker) => {
                let processes = TemplateProcesses::start(worker, sources, context).map_err(bad)?;
                let properties = processes.properties();
                (Renderer::Processes(processes), properties)
            }
        };
        Ok(Self { file: file.to_owned(), renderer, properties })
    }

    /// Properties of the template.
    pub(super) fn properties(&self) -> TemplateProperties {
        self.properties
    }

    /// Renders; the inner error is the template's own. Exceeding a limit is an outer error, as rendering part of the
    /// conversation would be pointless.
    pub(super) fn render(
        &self,
        messages: &[Map<String, Value>],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<Result<Rendered, String>, RowProblem> {
        let rendered = match &self.renderer {
            Renderer::Here(compiled) => compiled.render(messages, tools, add_generation_prompt),
            Renderer::Processes(processes) => processes.render(messages, tools, add_generation_prompt),
        };
        match rendered {
            Ok(rendered) => Ok(Ok(rendered)),
            Err(RenderError::Failed(message)) => Ok(Err(message)),
            Err(RenderError::LimitExceeded(what)) => {
                Err(RowProblem::TemplateStopped { file: self.file.clone(), what })
            }
        }
    }
}
