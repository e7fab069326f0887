// Renders conversations with a Modelfile's TEMPLATE as Ollama does: Go's text/template, the functions and the data that
// Ollama's documentation and templates name. Reads {"template", "conversations"} and writes {"texts", "tag", "think"}.
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
	"text/template/parse"
)

type arguments map[string]any

func (a arguments) String() string { text, _ := json.Marshal(a); return string(text) }

type message struct {
	Role      string
	Content   string
	Thinking  string
	ToolCalls []struct {
		Function struct {
			Name      string
			Arguments arguments
		}
	} `json:"tool_calls"`
}

type tools []struct {
	Type     string
	Function struct {
		Name        string
		Description string
		Parameters  struct {
			Type       string
			Required   []string
			Properties map[string]struct{ Type, Description string }
		}
	}
}

func (t tools) String() string { text, _ := json.Marshal(t); return string(text) }

type conversation struct {
	Messages []message
	Tools    tools
}

// Ollama's .System holds all system messages; neighbours of one role become one message, tool results excepted.
func collate(all []message) (string, []*message) {
	var system []string
	var out []*message
	for i := range all {
		m := &all[i]
		if m.Role == "system" {
			system = append(system, m.Content)
		}
		if n := len(out) - 1; n >= 0 && out[n].Role == m.Role && m.Role != "tool" {
			out[n].Content += "\n\n" + m.Content
		} else {
			out = append(out, m)
		}
	}
	return strings.Join(system, "\n\n"), out
}

// The lists of a tree from outside in, each with the pipeline that guards it; defined templates are not entered.
func visit(list *parse.ListNode, see func(guard string, list *parse.ListNode)) {
	if list == nil {
		return
	}
	for _, node := range list.Nodes {
		var branch *parse.BranchNode
		switch n := node.(type) {
		case *parse.IfNode:
			branch = &n.BranchNode
		case *parse.RangeNode:
			branch = &n.BranchNode
		case *parse.WithNode:
			branch = &n.BranchNode
		default:
			continue
		}
		see(branch.Pipe.String(), branch.List)
		visit(branch.List, see)
		visit(branch.ElseList, see)
	}
}

// The first text in a list, unless something is printed before it.
func firstText(list *parse.ListNode) string {
	for _, node := range list.Nodes {
		switch n := node.(type) {
		case *parse.TextNode:
			return string(n.Text)
		case *parse.RangeNode:
			return firstText(n.List)
		default:
			return ""
		}
	}
	return ""
}

func main() {
	var in struct {
		Template      string
		Conversations []conversation
	}
	check(json.NewDecoder(os.Stdin).Decode(&in))
	functions := template.FuncMap{"json": func(v any) string { text, _ := json.Marshal(v); return string(text) }}
	t, err := template.New("").Option("missingkey=zero").Funcs(functions).Parse(in.Template)
	check(err)
	out := struct {
		Texts []string  `json:"texts"`
		Tag   string    `json:"tag"`
		Think [2]string `json:"think"`
	}{}
	for _, c := range in.Conversations {
		var b strings.Builder
		system, messages := collate(c.Messages)
		check(t.Execute(&b, map[string]any{
			"System": system, "Messages": messages, "Tools": c.Tools, "Response": "", "Think": false, "IsThinkSet": false,
		}))
		out.Texts = append(out.Texts, b.String())
	}
	seen := false
	visit(t.Tree.Root, func(guard string, list *parse.ListNode) {
		if strings.Contains(guard, ".ToolCalls") && !seen {
			out.Tag, seen = strings.Split(strings.TrimSpace(firstText(list)), "{")[0], true
		}
		if guard == ".Thinking" {
			first, last := list.Nodes[0].(*parse.TextNode), list.Nodes[len(list.Nodes)-1].(*parse.TextNode)
			out.Think = [2]string{strings.TrimSpace(string(first.Text)), strings.TrimSpace(string(last.Text))}
		}
	})
	check(json.NewEncoder(os.Stdout).Encode(out))
}

func check(err error) {
	if err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		os.Exit(1)
	}
}
