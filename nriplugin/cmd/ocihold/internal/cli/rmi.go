package cli

import (
	"github.com/spf13/cobra"
)

func (a *app) removeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rmi IMAGE",
		Short: "Remove an image that nobody uses",
		Long: "Remove an image, by name, digest or ID, with all its names, from the root of a runtime handler, or, without\n" +
			"--handler, from every root that has it. An image in use in any root is refused, with who uses it. CRI-O has to be\n" +
			"running: it knows its containers. Works without the daemon, too.",
		Args: cobra.ExactArgs(1),
	}
	handler := handlerFlag(cmd, "remove from the root of this runtime handler only")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		config, crio, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		return a.ask(cmd.Context(), config, crio, func(store imageStore) error {
			return store.Remove(cmd.Context(), *handler, args[0])
		})
	}
	return cmd
}
