// Command node boots the real node of package realnode and brings it down.
//
//	node up --dir DIR [flags]              boot; returns when everything answers
//	node up --foreground [flags]           boot, print the exports; Ctrl-C brings it down
//	node down --dir DIR                    end everything, also after a crash
//	node kill PROGRAM --dir DIR [--signal N]
//	node start PROGRAM --dir DIR           PROGRAM: crio, ocihold, registry, proxy
//	node push REF --dir DIR [--file PATH=SOURCE] [--stack N]
//	node proxy spoil|clear|counts|reset-counts --dir DIR [flags]
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/test/proxy"
	"github.com/ocihold/ocihold/test/realnode"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		stop()
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{Use: "node", Short: "A real node in one directory", SilenceUsage: true, SilenceErrors: true}
	root.AddCommand(up(), down(), kill(), start(), push(), proxyCommand())
	return root
}

func dirFlag(cmd *cobra.Command, dir *string) {
	cmd.Flags().StringVar(dir, "dir", "", "the node's directory")
	_ = cmd.MarkFlagRequired("dir")
}

func up() *cobra.Command {
	o := realnode.Options{Log: logrus.New()}
	var foreground bool
	cmd := &cobra.Command{Use: "up", Short: "Boot a node", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		if foreground {
			return upForeground(cmd.Context(), o)
		}
		if o.Dir == "" {
			return errors.New("--dir is needed")
		}
		n, err := realnode.Up(cmd.Context(), o)
		if err != nil {
			return err
		}
		n.Close()
		return nil
	}}
	f := cmd.Flags()
	f.StringVar(&o.Dir, "dir", "", "the node's directory; in the foreground, none: a temporary one")
	f.StringVar(&o.OciholdConf, "ocihold-config", "", "`file` of settings for ocihold")
	f.StringArrayVar(&o.CRIOConf, "crio-conf", nil, "`file` of settings for CRI-O (repeatable)")
	f.BoolVar(&o.TLS, "tls", false, "the registry speaks HTTPS")
	f.StringVar(&o.Auth, "auth", "", "`user:password` that the registry asks for")
	f.BoolVar(&o.HandlerRoots, "handler-roots", false, "the handlers vm and wasm have roots of their own, wasm for platform wasi/wasm")
	f.BoolVar(&o.WithoutOcihold, "without-ocihold", false, "a plain CRI-O, for comparison")
	f.BoolVar(&foreground, "foreground", false, "print the exports and stay; Ctrl-C brings the node down")
	return cmd
}

func upForeground(ctx context.Context, o realnode.Options) (err error) {
	if o.Dir == "" {
		if o.Dir, err = os.MkdirTemp("", "ocihold-node-"); err != nil {
			return err
		}
		defer func() {
			if err == nil {
				err = os.RemoveAll(o.Dir)
			}
		}()
	}
	n, err := realnode.Up(ctx, o)
	if err != nil {
		return err
	}
	exports, err := os.ReadFile(n.EnvFile())
	if err == nil {
		fmt.Print(string(exports))
		<-ctx.Done()
	}
	return errors.Join(err, n.Down(context.WithoutCancel(ctx)))
}

func down() *cobra.Command {
	var dir string
	cmd := &cobra.Command{Use: "down", Short: "End a node and clean up after it", Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return realnode.Down(cmd.Context(), dir)
	}}
	dirFlag(cmd, &dir)
	return cmd
}

func kill() *cobra.Command {
	var dir string
	var sig int
	cmd := &cobra.Command{Use: "kill PROGRAM", Short: "Send a signal to one program", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
		n, err := realnode.Attach(dir)
		if err != nil {
			return err
		}
		defer n.Close()
		return n.Kill(cmd.Context(), args[0], syscall.Signal(sig))
	}}
	dirFlag(cmd, &dir)
	cmd.Flags().IntVar(&sig, "signal", int(syscall.SIGKILL), "the signal's `number`")
	return cmd
}

func start() *cobra.Command {
	var dir string
	cmd := &cobra.Command{Use: "start PROGRAM", Short: "Start one program again", Args: cobra.ExactArgs(1), RunE: func(cmd *cobra.Command, args []string) error {
		n, err := realnode.Attach(dir)
		if err != nil {
			return err
		}
		defer n.Close()
		return n.Start(cmd.Context(), args[0])
	}}
	dirFlag(cmd, &dir)
	return cmd
}

func proxyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "proxy", Short: "Control the proxy before the registry"}
	cmd.AddCommand(
		spoil(),
		onProxy("clear", "Drop all rules", (*proxy.Client).Clear),
		onProxy("reset-counts", "Forget the counts", (*proxy.Client).ResetCounts),
		onProxy("counts", "Print how often each request was made, as JSON", func(p *proxy.Client, ctx context.Context) error {
			counts, err := p.Counts(ctx)
			if err != nil {
				return err
			}
			return json.NewEncoder(os.Stdout).Encode(counts)
		}),
	)
	return cmd
}

func onProxy(use, short string, do func(*proxy.Client, context.Context) error) *cobra.Command {
	var dir string
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		n, err := realnode.Attach(dir)
		if err != nil {
			return err
		}
		defer n.Close()
		return do(n.Proxy(), cmd.Context())
	}}
	dirFlag(cmd, &dir)
	return cmd
}

func spoil() *cobra.Command {
	var rule proxy.Rule
	var cut, stall, flip int64
	var cmd *cobra.Command
	cmd = onProxy("spoil", "Add a rule: exactly one of --status, --cut, --stall and --flip", func(p *proxy.Client, ctx context.Context) error {
		for name, set := range map[string]func(){
			"cut":   func() { rule.Cut = &cut },
			"stall": func() { rule.Stall = &stall },
			"flip":  func() { rule.Flip = &flip },
		} {
			if cmd.Flags().Changed(name) {
				set()
			}
		}
		return p.Add(ctx, rule)
	})
	f := cmd.Flags()
	f.StringVar(&rule.Method, "method", "", "HTTP method; none: any")
	f.StringVar(&rule.Path, "path", "", "regular `expression` for the URL path")
	f.IntVar(&rule.Skip, "skip", 0, "requests to let pass first")
	f.IntVar(&rule.Times, "times", 0, "requests to spoil; 0: all")
	f.IntVar(&rule.Status, "status", 0, "answer with this status")
	f.Int64Var(&cut, "cut", 0, "close the connection after this many body `bytes`")
	f.Int64Var(&stall, "stall", 0, "send nothing after this many body `bytes`")
	f.Int64Var(&flip, "flip", 0, "invert the body's byte at this `offset`")
	return cmd
}
