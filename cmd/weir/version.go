package main

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/internal/obs"
)

func versionCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this build",
		Example: "  weir version -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			v := struct {
				Version string `json:"version"`
				Go      string `json:"go"`
			}{obs.Version(), runtime.Version()}
			return out.write(cmd.OutOrStdout(), v, func(w io.Writer) {
				fmt.Fprintf(w, "weir %s\t%s\n", v.Version, v.Go)
			})
		},
	}
	out.bind(cmd)
	return cmd
}
