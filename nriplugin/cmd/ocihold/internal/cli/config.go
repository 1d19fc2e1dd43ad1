package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/conf"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print what CRI-O has to be told",
		Args:  cobra.NoArgs,
		RunE:  help,
	}
	cmd.AddCommand(
		&cobra.Command{
			Use:   "crio",
			Short: "Print the drop-in for crio.conf.d",
			Args:  cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				config, crio, err := a.loadCRIO(cmd)
				if err != nil {
					return err
				}
				return a.print(conf.DropIn(config, crio))
			},
		},
		&cobra.Command{
			Use:   "hook",
			Short: "Print the OCI hook file",
			Args:  cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				config, err := a.load(cmd)
				if err != nil {
					return err
				}
				return a.print(conf.HookFile(config))
			},
		},
	)
	return cmd
}

func (a *app) print(text []byte, err error) error {
	if err != nil {
		return err
	}
	if _, err := a.out.Write(text); err != nil {
		return fmt.Errorf("write answer: %w", err)
	}
	return nil
}
