package limits

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

const maxFile = 8 << 20 // bytes of one policy file

// Load reads a policy from a file, or from a folder: all its *.yaml and *.yml files in the order of their names, as one
// policy. Lists are joined, mappings are merged, and what two files both say is a mistake that names both places. Files
// that start with a dot or #, or end in ~, .bak or .swp are not policy.
func Load(path string) (*Policy, error) {
	sources, err := readSources(path)
	if err != nil {
		return nil, err
	}
	return build(sources)
}

// source is the text of one policy file.
type source struct {
	name string
	data []byte
}

func readSources(path string) ([]source, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read policy: %w", err)
	}
	if !info.IsDir() {
		s, err := readSource(path)
		if err != nil {
			return nil, err
		}
		return []source{s}, nil
	}
	entries, err := os.ReadDir(path) // sorted by name
	if err != nil {
		return nil, fmt.Errorf("read policy: %w", err)
	}
	var sources []source
	for _, e := range entries {
		if !isPolicyName(e.Name()) {
			continue
		}
		file := filepath.Join(path, e.Name())
		if info, err := os.Stat(file); err == nil && info.IsDir() { // Stat, for in Kubernetes the files are symlinks
			continue
		}
		s, err := readSource(file)
		if err != nil {
			return nil, err
		}
		sources = append(sources, s)
	}
	if len(sources) == 0 {
		return nil, &Error{File: path, Msg: "folder without a *.yaml or *.yml file"}
	}
	return sources, nil
}

// readSource reads one file, or just enough of it to see that it is too large.
func readSource(path string) (source, error) {
	f, err := os.Open(path)
	if err != nil {
		return source{}, fmt.Errorf("read policy: %w", err)
	}
	defer f.Close() //nolint:errcheck // read only
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return source{}, fmt.Errorf("read policy: %w", err)
	}
	return source{path, data}, nil
}

// isPolicyName says whether a file of a folder is policy, rather than what an editor left behind.
func isPolicyName(name string) bool {
	if strings.HasPrefix(name, ".") || strings.HasPrefix(name, "#") {
		return false
	}
	ext := filepath.Ext(name)
	return ext == ".yaml" || ext == ".yml"
}
