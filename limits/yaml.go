package limits

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// place is where something is said.
type place struct {
	file  string
	line  int
	field string
}

func (p place) at(n *yaml.Node) place { p.line = n.Line; return p }

// key is the place of a key below p. Names that hold more than plain letters are quoted, so that no two fields look alike.
func (p place) key(name string) place {
	if !plainName.MatchString(name) {
		name = strconv.Quote(name)
	}
	if p.field != "" {
		name = p.field + "." + name
	}
	p.field = name
	return p
}

func (p place) index(i int) place {
	p.field = fmt.Sprintf("%s[%d]", p.field, i)
	return p
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// parseYAML is the root of the one document in s, or nil after a mistake.
func (b *builder) parseYAML(s source) *yaml.Node {
	at := place{file: s.name, line: 1}
	if len(s.data) > maxFile {
		b.fail(at, "file is larger than %d MiB", maxFile>>20)
		return nil
	}
	if i := firstNoise(s.data); i >= 0 {
		at.line = 1 + bytes.Count(s.data[:i], []byte("\n"))
		b.fail(at, "not a text file: byte %#02x is not UTF-8 text", s.data[i])
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(s.data))
	var doc, second yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && isNull(doc.Content[0]) {
		b.fail(at, "file is empty")
		return nil
	}
	if err == nil {
		if err = dec.Decode(&second); err == nil {
			b.fail(at.at(&second), "a second document starts here: a file holds one")
			return nil
		}
	}
	if !errors.Is(err, io.EOF) {
		var msg string
		if at.line, msg = yamlError(err); tabIndented(s.data, at.line) {
			msg = "tab in the indentation: YAML wants spaces"
		}
		b.fail(at, "%s", msg)
		return nil
	}
	root := doc.Content[0]
	if !b.plainNodes(at, root) {
		return nil
	}
	if root.Kind != yaml.MappingNode {
		b.fail(at.at(root), "want a mapping that starts with version: 1, got %s", kind(root))
		return nil
	}
	return root
}

// firstNoise is the index of the first byte that no text file has, or -1.
func firstNoise(data []byte) int {
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		if r == utf8.RuneError && n == 1 || r < ' ' && r != '\n' && r != '\r' && r != '\t' {
			return i
		}
		i += n
	}
	return -1
}

var yamlLine = regexp.MustCompile(`^line (\d+): `)

// yamlError takes the line out of the text of a YAML error, which has it nowhere else.
func yamlError(err error) (line int, msg string) {
	msg = strings.TrimPrefix(err.Error(), "yaml: ")
	line = 1 // which the parser leaves out
	if m := yamlLine.FindStringSubmatch(msg); m != nil {
		line, _ = strconv.Atoi(m[1])
		msg = msg[len(m[0]):]
	}
	return line, "not valid YAML: " + msg
}

func tabIndented(data []byte, line int) bool {
	n := 1
	for l := range bytes.Lines(data) {
		if n == line {
			indent := l[:len(l)-len(bytes.TrimLeft(l, " \t"))]
			return bytes.IndexByte(indent, '\t') >= 0
		}
		n++
	}
	return false
}

// plainNodes refuses what a policy has no use for and what makes small files large.
func (b *builder) plainNodes(at place, n *yaml.Node) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		b.fail(at.at(n), "alias *%s: a policy file has no aliases", n.Value)
		return false
	case n.Anchor != "":
		b.fail(at.at(n), "anchor &%s: a policy file has no anchors", n.Anchor)
		return false
	case n.Style&yaml.TaggedStyle != 0:
		b.fail(at.at(n), "tag %s: a policy file has no tags", n.Tag)
		return false
	}
	ok := true
	for _, c := range n.Content {
		ok = b.plainNodes(at, c) && ok
	}
	return ok
}

// once records that at says something, and reports it if it has been said before.
func (b *builder) once(key string, at place) bool {
	if before, ok := b.said[key]; ok {
		b.fail(at, "duplicate: already given at %s:%d", before.file, before.line)
		return false
	}
	b.said[key] = at
	return true
}

// fields hands the values of a mapping with known keys to their functions, in the order of the file.
func (b *builder) fields(at place, n *yaml.Node, known map[string]func(place, *yaml.Node)) {
	b.entries(at, n, func(name string, at place, n *yaml.Node) {
		f, ok := known[name]
		if !ok {
			var names []string
			for k := range known {
				names = append(names, k)
			}
			slices.Sort(names)
			b.fail(at, "unknown key (known are %s)", strings.Join(names, ", "))
			return
		}
		if b.once(at.field, at) {
			f(at, n)
		}
	})
}

// entries hands the values of a mapping with free names to each, in the order of the file.
func (b *builder) entries(at place, n *yaml.Node, each func(name string, at place, n *yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		b.fail(at.at(n), "want a mapping, got %s", kind(n))
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || isNull(k) {
			b.fail(at.at(k), "want a word as key, got %s", kind(k))
			continue
		}
		each(k.Value, at.key(k.Value).at(k), v)
	}
}

// items hands the items of a list to each.
func (b *builder) items(at place, n *yaml.Node, each func(place, *yaml.Node)) {
	if n.Kind != yaml.SequenceNode {
		b.fail(at.at(n), "want a list, got %s", kind(n))
		return
	}
	for i, c := range n.Content {
		each(at.index(i).at(c), c)
	}
}

// text is the text of a scalar that is not null.
func (b *builder) text(at place, n *yaml.Node) (string, bool) {
	if n.Kind != yaml.ScalarNode || isNull(n) {
		b.fail(at, "want a word, got %s", kind(n))
		return "", false
	}
	return n.Value, true
}

// choice is the index of a scalar among words, or of a word that is known but not supported.
func (b *builder) choice(at place, n *yaml.Node, words []string, unsupported ...string) (int, bool) {
	s, ok := b.text(at, n)
	if !ok {
		return 0, false
	}
	if i := slices.Index(words, s); i >= 0 {
		return i, true
	}
	if len(words) == 1 && len(unsupported) == 0 {
		b.fail(at, "want %s, got %q", words[0], s)
	} else if slices.Contains(unsupported, s) {
		b.fail(at, "%s is not supported by this version (supported: %s)", s, strings.Join(words, ", "))
	} else {
		b.fail(at, "%q is not one of %s", s, strings.Join(slices.Concat(words, unsupported), ", "))
	}
	return 0, false
}

// integer is a decimal whole number in [least, most].
func (b *builder) integer(at place, n *yaml.Node, least, most int64) (int64, bool) {
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" {
		b.fail(at, "want a whole number, got %s", kind(n))
		return 0, false
	}
	i, err := strconv.ParseInt(n.Value, 10, 64)
	if err != nil || i < least || i > most {
		b.fail(at, "%s is not a whole number from %d to %d", n.Value, least, most)
		return 0, false
	}
	return i, true
}

// name is a name that can stand in a metric, a table and a subject without quoting.
func (b *builder) name(at place, n *yaml.Node) (string, bool) {
	s, ok := b.text(at, n)
	if ok && !plainName.MatchString(s) {
		b.fail(at, "name %q: want 1 to 64 of A-Z a-z 0-9 _ -", s)
		return "", false
	}
	return s, ok
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// kind says what a node is, for messages.
func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	if isNull(n) {
		return "nothing"
	}
	v := []rune(n.Value)
	if len(v) > 40 {
		v = append(v[:40], '…')
	}
	return strconv.Quote(string(v))
}
