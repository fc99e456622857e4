//! A folder's chat template, rendered in this process or in processes of its own.

use serde_json::{Map, Value};

use super::RowProblem;
use super::chat_template::{CompiledTemplate, NotRendered, Rendered, Sources, Surroundings, TemplateFacts};
use super::template_process::{TemplateProcesses, Worker};

/// A chat template that is ready to render.
pub(super) struct ChatTemplate {
    /// Where it was found.
    file: String,
    renderer: Renderer,
    facts: TemplateFacts,
}

enum Renderer {
    Here(Box<CompiledTemplate>),
    Processes(TemplateProcesses),
}

impl ChatTemplate {
    /// Compiles the templates found in `file`, in this process or by a worker.
    pub(super) fn new(
        file: &str,
        sources: &Sources,
        around: &Surroundings,
        worker: Option<&Worker>,
    ) -> Result<Self, RowProblem> {
        let bad = |error| match error {
            NotRendered::Refused(message) => RowProblem::BadTemplate { file: file.to_owned(), message },
            NotRendered::Stopped(what) => RowProblem::TemplateStopped { file: file.to_owned(), what },
        };
        let (renderer, facts) = match worker {
            None => {
                let compiled = CompiledTemplate::new(sources, around).map_err(bad)?;
                let facts = compiled.facts();
                (Renderer::Here(Box::new(compiled)), facts)
            }
            Some(worker) => {
                let processes = TemplateProcesses::start(worker, sources, around).map_err(bad)?;
                let facts = processes.facts();
                (Renderer::Processes(processes), facts)
            }
        };
        Ok(Self { file: file.to_owned(), renderer, facts })
    }

    /// What is known of it without a row.
    pub(super) fn facts(&self) -> TemplateFacts {
        self.facts
    }

    /// Renders; `Err` within is what the template said when it refused. A template that had to be stopped is an error of
    /// its own: there is no sense in rendering part of the conversation.
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
            Err(NotRendered::Refused(message)) => Ok(Err(message)),
            Err(NotRendered::Stopped(what)) => {
                Err(RowProblem::TemplateStopped { file: self.file.clone(), what })
            }
        }
    }
}
